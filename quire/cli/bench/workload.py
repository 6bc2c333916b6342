"""Synthetic requests: random token ids of chosen lengths, the same for the same seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.foundation.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    num_prompts: int = 1000
    """Requests in all."""
    input_len: int = 1024
    """Prompt tokens of a request."""
    output_len: int = 128
    """Tokens to generate; the end of the text is ignored, so all are."""
    range_ratio: float = 0.0
    """Spread of both lengths: uniform in [length x (1 - ratio), length x (1 + ratio)]."""
    prefix_len: int = 0
    """Tokens at the beginning that all prompts share, on top of input_len."""
    workload_seed: int = 0
    """Seed of the random prompts."""


@dataclass(frozen=True)
class Shot:
    """One request of a benchmark."""

    token_ids: list[int]
    output_len: int


def make_shots(config: WorkloadConfig, vocab_size: int) -> list[Shot]:
    """Raises ConfigError for lengths or a ratio that make no sense."""
    for name in ("num_prompts", "input_len", "output_len"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} must be >= 1, got {getattr(config, name)}", name)
    if not 0 <= config.range_ratio < 1:
        raise ConfigError(f"range_ratio must be in [0, 1), got {config.range_ratio}", "range_ratio")
    random = np.random.default_rng(config.workload_seed)
    prefix = random.integers(0, vocab_size, config.prefix_len).tolist()
    shots = []
    for inputs, outputs in zip(
        _lengths(random, config.input_len, config), _lengths(random, config.output_len, config), strict=True
    ):
        shots.append(Shot(prefix + random.integers(0, vocab_size, inputs).tolist(), outputs))
    return shots


def _lengths(random: np.random.Generator, middle: int, config: WorkloadConfig) -> list[int]:
    low, high = int(middle * (1 - config.range_ratio)), int(middle * (1 + config.range_ratio))
    lengths: list[int] = random.integers(max(low, 1), max(high, 1) + 1, config.num_prompts).tolist()
    return lengths
