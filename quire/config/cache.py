"""The KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.config.options import AboveZero, Options, Positive

KVCacheDtype = Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
StateDtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Options):
    block_size: Positive = 16
    """Tokens a KV block."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Type of keys and values in the cache. auto: the model's; fp8 (e4m3): half the memory and half the reads."""
    mamba_ssm_cache_dtype: StateDtype = "auto"
    """Type of the states of scans (Mamba, delta rules), which every step reads and writes. auto: float32, as
    transformers keeps them; bfloat16: half the memory, half the reads and writes, and less exact."""
    gpu_memory_utilization: AboveZero = 0.92
    """Share of the memory that is free at start which this engine may take (weights, activations and KV cache)."""
    kv_cache_memory_bytes: Positive | None = None
    """Exact size of the KV cache; overrides the share."""
    num_gpu_blocks_override: Positive | None = None
    """Exact number of KV blocks, for tests."""
    enable_prefix_caching: bool | None = None
    """Reuse the KV blocks of equal prompt beginnings. None: yes, but not for models whose layers keep a state."""
    cpu_kv_cache_memory_bytes: Positive | None = None
    """Size of the KV cache on a CPU. None: what all seats could fill, at most a quarter of the free memory."""

    @property
    def state_dtype(self) -> str:
        """Of scans."""
        return "float32" if self.mamba_ssm_cache_dtype == "auto" else self.mamba_ssm_cache_dtype
