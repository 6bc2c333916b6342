"""Requests over time, a line of JSON each."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from quire.foundation.errors import ConfigError
from quire.types.request import EngineRequest
from quire.types.sampling import RequestOutputKind, SamplingParams

_VOCAB = 100_000


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """arrival: seconds. prompt: its token ids, or `prompt_tokens` of them that nobody knows. output_tokens: that it
    generates. shared_tokens: of the beginning of such a prompt, the same for all lines of one `prefix`. stream: whether
    somebody reads along, so that steps are kept short."""

    output_tokens: int
    arrival: float = 0.0
    prompt: list[int] | None = None
    prompt_tokens: int = 0
    prefix: str = ""
    shared_tokens: int = 0
    priority: int = 0
    stream: bool = True


def read_trace(path: str, *, offline: bool = False) -> list[EngineRequest]:
    """In the order of their arrival. offline: nobody reads along. Raises ConfigError naming the line."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"trace: {path!r} cannot be read: {error.strerror}", "trace") from None
    found = []
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            line = msgspec.json.decode(raw, type=Line)
            found.append(request_of(msgspec.structs.replace(line, stream=line.stream and not offline), number))
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
    kind = RequestOutputKind.DELTA if line.stream else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(max_tokens=line.output_tokens, ignore_eos=True, output_kind=kind)
    return EngineRequest(
        id=str(number), token_ids=ids, params=params,
        max_tokens=line.output_tokens, arrival=line.arrival, priority=line.priority,
    )  # fmt: skip


def _ids(seed: str, count: int) -> np.ndarray:
    return np.random.default_rng(list(seed.encode())).integers(0, _VOCAB, count, np.int32)
