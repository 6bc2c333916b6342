"""LoRA adapters: how many, how large, and where in the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.config.options import Options, Positive
from quire.foundation.errors import ConfigError

LARGEST_RANK = 512


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Options):
    enable_lora: bool = False
    """Take LoRA adapters; see docs/lora.md."""
    max_loras: Positive = 1
    """Adapters on the device, and so in one batch: requests for others wait for a place."""
    max_lora_rank: int = 16
    """Largest rank of an adapter. Each of max_loras places takes memory for it, in every layer."""
    max_cpu_loras: int | None = None
    """Adapters kept in the host's memory, those on the device among them; others are read again when they are asked
    for. None: max_loras."""
    lora_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Type of the adapters' numbers. auto: the model's."""
    lora_target_modules: list[str] = field(default_factory=list)
    """Names, or ends of names, of the modules that adapters may change (q_proj, lm_head, experts); others take no
    memory, and adapters that change them are refused. None given: all."""
    fully_sharded_loras: bool = False
    """Refused: of each matrix an adapter's factors are shared among ranks as the matrix itself is, by rows or
    columns."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        super().__post_init__()
        if not 1 <= self.max_lora_rank <= LARGEST_RANK:
            raise ConfigError(
                f"max_lora_rank must be in [1, {LARGEST_RANK}], got {self.max_lora_rank}", "max_lora_rank"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras must be >= max_loras = {self.max_loras}, got {self.max_cpu_loras}", "max_cpu_loras"
            )
        if self.fully_sharded_loras:
            raise ConfigError(
                "fully_sharded_loras is not supported: factors are shared among ranks as their matrix is, one of the "
                "two by rows or columns and the other whole",
                "fully_sharded_loras",
            )

    @property
    def num_kept(self) -> int:
        """In the host's memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
