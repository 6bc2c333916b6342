"""What the brain must know of a model, read from its folder as plain JSON (no torch, no remote code)."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.dual_chunk import read_dual_chunks
from quire.config.generation import read_generation_config, sampling_defaults, token_ids
from quire.config.hf_config import HFConfig, architecture_of, config_file, read_hf_config, sees_both_ways
from quire.config.quantization import checkpoint_quantization
from quire.config.reading import read, read_count
from quire.config.rope import context_length
from quire.config.transformers_models import TRANSFORMERS, implementation, runs_code
from quire.foundation.errors import ConfigError

DTYPE_ALIASES = {
    "half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32",
}  # fmt: skip
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "float64": "float32"}  # as they run
_MAX_HEADER = 100_000_000  # bytes of a safetensors header
# transformers' end token of these families, for folders that say none anywhere.
_USUAL_EOS = {"llama": 2, "mistral": 2}
# Families whose first token has the position after that of padding, which has its token's id.
_PADDED_POSITIONS = ("roberta", "xlm_roberta")
_UNBOUNDED = 1 << 20  # tokens of context where config.json has no bound: of models that keep a state alone


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts of the model folder that scheduling, the front end and the worker share."""

    path: str  # local folder
    architecture: str  # e.g. "Qwen3ForCausalLM"
    hf_config: dict[
        str, Any
    ]  # config.json, overrides applied, completed unless transformers does (config/hf_config.py)
    vocab_size: int
    max_position: int  # context the model was made for, rope scaling included
    eos_token_ids: list[int]  # config.json and generation_config.json together, the first is the main one
    bos_token_id: int | None
    dtype: str  # of the checkpoint: bfloat16 | float16 | float32
    usual_context: int = 0  # tokens that it takes unless more is asked for; 0: all
    hidden_size: int = 0  # of an embedding; 0: not known
    generation_defaults: dict[str, Any] = field(default_factory=dict)  # sampling defaults of generation_config.json
    unknown_keys: tuple[str, ...] = ()  # of config.json, that mean nothing
    sees_both_ways: bool = False  # a decoder whose tokens attend to those behind them too: it only pools
    quantization: dict[str, Any] = field(default_factory=dict)  # of the checkpoint (config/quantization.py); {}: none
    wrapper: str = ""  # the architecture whose text part this is (config/files/wrappers.py)
    is_mistral: bool = False  # its files are of Mistral's own form (config/files/mistral_format.py)
    family: str = ""  # name of the user's own family that builds it; "": one of those that come with Quire
    impl: str = ""  # "transformers": no family builds it; see config/transformers_models.py
    runs_code: bool = False  # that comes with the checkpoint


def check_architecture(
    folder: Path, overrides: Mapping[str, Any], impl: str = "auto", form: str = "auto", *, trusted: bool = False
) -> None:
    """From config.json alone, before anything else is looked at. Raises ConfigError for one that nothing builds."""
    config = {**config_file(folder, form)[0], **overrides}
    implementation(config, architecture_of(config, f"{folder}/config.json"), impl, trusted=trusted)


def read_model_info(
    path: Path,
    overrides: Mapping[str, Any],
    generation_config: str = "auto",
    impl: str = "auto",
    form: str = "auto",
    *,
    trusted: bool = False,
) -> ModelInfo:
    """Read `path`/config.json, or what stands for it, and generation_config.json. impl, form, trusted: see
    `read_hf_config`.

    Raises ConfigError naming file and key for what is missing, of the wrong type, out of range or not supported.
    """
    config = read_hf_config(path, overrides, impl, form, trusted=trusted)
    through = config.family.name == TRANSFORMERS
    generation, generation_file = read_generation_config(generation_config, path)
    values, vocab_size = config.values, config.values["vocab_size"]
    file = f"{path}/config.json"
    eos = token_ids(generation, "eos_token_id", vocab_size, generation_file)
    eos += token_ids(values, "eos_token_id", vocab_size, file)
    if "eos_token_id" not in generation and "eos_token_id" not in values and config.family.name in _USUAL_EOS:
        eos = [_USUAL_EOS[config.family.name]]
    return ModelInfo(
        path=str(path),
        architecture=config.architecture,
        hf_config=config.given if through else values,
        vocab_size=vocab_size,
        max_position=_max_position(config),
        usual_context=0 if through or (dual := read_dual_chunks(values)) is None else dual.usual,
        eos_token_ids=list(dict.fromkeys(eos)),
        bos_token_id=next(iter(token_ids(values, "bos_token_id", vocab_size, file)), None),
        dtype=_dtype(path, values),
        hidden_size=values.get("hidden_size") or 0,
        generation_defaults=sampling_defaults(generation, generation_file),
        unknown_keys=config.unknown,
        sees_both_ways=sees_both_ways(config),
        quantization=checkpoint_quantization(path, values),
        wrapper=config.wrapper,
        is_mistral=config.is_mistral,
        family=config.family.name if config.family.is_own else "",
        impl=TRANSFORMERS if through else "",
        runs_code=through and runs_code(config.given, config.architecture),
    )


def _dtype(path: Path, config: Mapping[str, Any]) -> str:
    """What the weights run in: as config.json says, else as they are stored."""
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    told = read(str, config, key, "auto").removeprefix("torch.")
    found = DTYPE_ALIASES.get(told, told)
    if found == "auto":
        return _dtype_on_disk(path)
    if found not in _DTYPES:
        raise ConfigError(f"config.json: {key} must be one of {', '.join(_DTYPES)}, got {told!r}", "dtype")
    return _DTYPES[found]


def _dtype_on_disk(path: Path) -> str:
    """Of the weights, for configs that do not say it (older ones); bfloat16 if there are none to look at."""
    for file in sorted(path.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                (size,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(size, _MAX_HEADER)))
            found = Counter(entry["dtype"] for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, struct.error, TypeError, KeyError, AttributeError):
            break  # whoever loads it says what is wrong with it
        known = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float32"}
        return next((known[name] for name, _ in found.most_common() if name in known), "bfloat16")
    return "bfloat16"


def _max_position(config: HFConfig) -> int:
    longest: int = config.values.get("max_position_embeddings", _UNBOUNDED)
    if config.family.name == TRANSFORMERS:
        return longest
    if config.family.name == "mpnet":
        longest -= 2
    if config.family.name in _PADDED_POSITIONS:
        longest -= read_count(config.values, "pad_token_id") + 1
    longest = context_length(config.values.get("rope_parameters", {}), longest)
    if longest < 1:
        raise ConfigError(
            f"config.json: max_position_embeddings={config.values['max_position_embeddings']} leaves no position",
            "max_position_embeddings",
        )
    return longest
