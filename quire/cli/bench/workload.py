"""Requests of a benchmark: random token ids of chosen lengths, or a file's conversations, the same for one seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.foundation.errors import ConfigError

CHARS_A_TOKEN = 4  # of answers in a file, whose tokens nobody has counted


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
    """Tokens at the beginning that prompts share, on top of input_len."""
    num_prefixes: int = 1
    """Groups of prompts, each with a shared beginning of its own."""
    workload_seed: int = 0
    """Seed of the random prompts."""


@dataclass(frozen=True)
class Shot:
    """One request of a benchmark: token ids, or text that the server encodes."""

    token_ids: list[int]
    output_len: int
    text: str | None = None


def make_shots(config: WorkloadConfig, vocab_size: int) -> list[Shot]:
    """Raises ConfigError for lengths or a ratio that make no sense."""
    for name in ("num_prompts", "input_len", "output_len", "num_prefixes"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} must be >= 1, got {getattr(config, name)}", name)
    if not 0 <= config.range_ratio < 1:
        raise ConfigError(f"range_ratio must be in [0, 1), got {config.range_ratio}", "range_ratio")
    random = np.random.default_rng(config.workload_seed)
    prefixes = [random.integers(0, vocab_size, config.prefix_len).tolist() for _ in range(config.num_prefixes)]
    lengths = zip(_lengths(random, config.input_len, config), _lengths(random, config.output_len, config), strict=True)
    return [
        Shot(prefixes[i % len(prefixes)] + random.integers(0, vocab_size, inputs).tolist(), outputs)
        for i, (inputs, outputs) in enumerate(lengths)
    ]


def read_shots(path: str, config: WorkloadConfig) -> list[Shot]:
    """Prompts of a file, drawn at random without repeats while there are any; answers as long as those in it.

    A JSON list or one object a line: `conversations` of `from` and `value` (ShareGPT), `messages` of `role` and
    `content`, or `prompt` with `answer` or `output_len`. An answer that is not there has output_len tokens; one that is
    there counts a token for four characters. Raises ConfigError.
    """
    shots = [shot for number, item in enumerate(_items(Path(path))) if (shot := _shot(item, number, path, config))]
    if not shots:
        raise ConfigError(f"dataset {path!r} holds no prompt", "dataset")
    order = np.random.default_rng(config.workload_seed).permutation(len(shots))
    return [shots[order[i % len(shots)]] for i in range(config.num_prompts)]


def _items(file: Path) -> Iterator[Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            yield from json.loads(text)
        else:
            yield from (json.loads(line) for line in text.splitlines() if line.strip())
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset {str(file)!r} cannot be read: {error}", "dataset") from None


def _shot(item: Any, number: int, path: str, config: WorkloadConfig) -> Shot | None:
    """The first thing that is asked for, and how long the answer is; None: nothing is asked."""
    try:
        if "prompt" in item:
            prompt, answer, count = item["prompt"], item.get("answer"), item.get("output_len")
        else:
            turns = item.get("conversations") or item["messages"]
            told = [turn.get("value", turn.get("content")) for turn in turns]
            who = [turn.get("from", turn.get("role")) for turn in turns]
            first = next((i for i, one in enumerate(who) if one in ("human", "user")), None)
            if first is None:
                return None
            prompt, answer, count = told[first], told[first + 1] if first + 1 < len(told) else None, None
    except (AttributeError, KeyError, TypeError):
        raise ConfigError(
            f"dataset {path!r}: item {number} must have conversations, messages or prompt", "dataset"
        ) from None
    if not isinstance(prompt, str) or not prompt:
        return None
    if count is None:
        count = max(len(answer) // CHARS_A_TOKEN, 1) if isinstance(answer, str) else config.output_len
    return Shot([], int(count), prompt)


def _lengths(random: np.random.Generator, middle: int, config: WorkloadConfig) -> list[int]:
    low, high = int(middle * (1 - config.range_ratio)), int(middle * (1 + config.range_ratio))
    lengths: list[int] = random.integers(max(low, 1), max(high, 1) + 1, config.num_prompts).tolist()
    return lengths
