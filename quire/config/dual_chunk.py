"""Dual chunk attention (An et al., 2024), as Qwen2.5-1M declares it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.config.reading import read_count, read_positive, read_section
from quire.foundation.errors import ConfigError

_KEY = "dual_chunk_attention_config"


class DualChunks(NamedTuple):
    """Tokens of a chunk; farthest: the position that is farthest from a key's; trained: tokens of the longest text that
    the model was trained with."""

    chunk: int
    farthest: int
    trained: int

    @property
    def usual(self) -> int:
        """Tokens of texts up to which it is attention as usual: what it does to positions, and to the scale, begins
        behind the first chunk."""
        return min(self.chunk, self.trained)


def read_dual_chunks(config: Mapping[str, Any]) -> DualChunks | None:
    """None: the model has no such attention. Raises ConfigError for what cannot be."""
    told = read_section(config, _KEY)
    if not told:
        return None
    size, local = read_positive(told, "chunk_size", 8192), read_count(told, "local_size", 1024)
    if local >= size:
        raise ConfigError(f"config.json: {_KEY}: local_size={local} must be < chunk_size={size}", _KEY)
    if told.get("sparse_attention_enabled", told.get("sparse_attention_config") is not None):
        raise ConfigError(
            f"config.json: {_KEY}: sparse attention is not supported: set sparse_attention_enabled to false to attend "
            "to all tokens",
            _KEY,
        )
    return DualChunks(size - local, size, read_positive(told, "original_max_position_embeddings", size))
