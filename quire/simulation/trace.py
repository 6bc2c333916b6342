"""Requests over time, a line of JSON each."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from quire.foundation.errors import ConfigError
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

_VOCAB = 100_000


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """arrival: seconds. prompt: its token ids, or `prompt_tokens` of them that nobody knows. output_tokens: that it
    generates. shared_tokens: of the beginning of such a prompt, the same for all lines of one `prefix`."""

    output_tokens: int
    arrival: float = 0.0
    prompt: list[int] | None = None
    prompt_tokens: int = 0
    prefix: str = ""
    shared_tokens: int = 0
    priority: int = 0


def read_trace(path: str) -> list[EngineRequest]:
    """In the order of their arrival. Raises ConfigError naming the line."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"trace: {path!r} cannot be read: {error.strerror}", "trace") from None
    found = []
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            found.append(request_of(msgspec.json.decode(raw, type=Line), number))
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(f"trace: line {number} of {path}: {error}", "trace") from None
    if not found:
        raise ConfigError(f"trace: {path!r} has no requests", "trace")
    return sorted(found, key=lambda request: request.arrival)


def request_of(line: Line, number: int) -> EngineRequest:
    """Raises ValueError for numbers that mean nothing."""
    if line.output_tokens < 1 or line.arrival < 0:
        raise ValueError("output_tokens must be >= 1 and arrival >= 0")
    if line.prompt is not None:
        ids = np.asarray(line.prompt, np.int32)
    else:
        own = line.prompt_tokens - line.shared_tokens
        if line.prompt_tokens < 1 or line.shared_tokens < 0 or own < 0:
            raise ValueError("prompt, or prompt_tokens >= 1 and shared_tokens up to as many, must be given")
        ids = np.concatenate([_ids(f"prefix {line.prefix}", line.shared_tokens), _ids(f"line {number}", own)])
    return EngineRequest(
        id=str(number), token_ids=ids, params=SamplingParams(max_tokens=line.output_tokens, ignore_eos=True),
        max_tokens=line.output_tokens, arrival=line.arrival, priority=line.priority,
    )  # fmt: skip


def _ids(seed: str, count: int) -> np.ndarray:
    return np.random.default_rng(list(seed.encode())).integers(0, _VOCAB, count, np.int32)
