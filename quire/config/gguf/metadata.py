"""A GGUF file's metadata of the model's own family, by key; each that is read is known, and the others are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown

SIZES = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}  # fmt: skip
# What is said twice, or of other programs.
SAID_ELSEWHERE = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_rms_epsilon",
                   "attention.layer_norm_epsilon", "quantized_by")  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "expert_count": (0,), "expert_used_count": (0,), "expert_shared_count": (0,),
    "leading_dense_block_count": (0,), "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1),
    "nextn_predict_layers": (0,), "use_parallel_residual": (True,), "logit_scale": (0, 1),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,), "attention.sliding_window": (0,), "pooling_type": (0,),
    "interleave_moe_layer_step": (1,), "expert_group_count": (0, 1), "expert_group_used_count": (0, 1),
}  # fmt: skip


class Metadata:
    """Of the model's own family, by key; each that is read is known, and the others are not."""

    def __init__(
        self,
        metadata: Mapping[str, Any],
        neutral: Mapping[str, tuple[Any, ...]] | None = None,
        *,
        some_without: bool = False,
    ) -> None:
        """neutral: values by key that say no more than the family does. some_without: layers may lack what others
        have, and say 0."""
        self._some_without = some_without
        self._neutral = {**_NEUTRAL, **(neutral or {})}
        self._prefix = f"{metadata['general.architecture']}."
        self._values = {k.removeprefix(self._prefix): v for k, v in metadata.items() if k.startswith(self._prefix)}
        self.known: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value of a list that holds one and the same for every layer is that one. Raises ConfigError."""
        self.known.add(key)
        value = self._values.get(key, default)
        if isinstance(value, list) and key in SIZES:
            if self._some_without:
                value = [one for one in value if one] or value
            if len(set(value)) != 1:
                raise ConfigError(f"{self._prefix}{key} differs by layer, which is not supported", "model")
            return value[0]
        return value

    @property
    def architecture(self) -> str:
        return self._prefix.rstrip(".")

    def by_layer(self, key: str) -> list[Any] | None:
        """A list as it is; None: it is none."""
        self.known.add(key)
        value = self._values.get(key)
        return value if isinstance(value, list) else None

    def pass_over(self, prefix: str) -> None:
        """What is said of something that the family has not."""
        self.known |= {key for key in self._values if key.startswith(prefix)}

    def number(self, key: str, kind: type = int) -> Any:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int) or value <= 0:
            raise ConfigError(f"{self._prefix}{key} must be a number > 0, got {shown(value)}", "model")
        return value

    def refuse_others(self) -> None:
        """Raises ConfigError for what would change the answer if anybody knew it."""
        strange = []
        for key, value in self._values.items():
            if key in self.known or key in SAID_ELSEWHERE or value in self._neutral.get(key, ()):
                continue
            strange.append(f"{self._prefix}{key}={shown(value)}")
        if strange:
            raise ConfigError(
                f"the GGUF file has settings that are not supported: {', '.join(sorted(strange))}", "model"
            )
