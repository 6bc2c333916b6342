"""One request as the engine core sees it: token ids only, everything about text stays in the frontend."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.types.pooling import Pooling
from quire.types.sampling import SamplingParams
from quire.types.structured import Constraint

BACKGROUND = 2**62  # the priority of work that nobody waits for: behind all other requests, under every policy


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Built by `frontend.inputs.build`; nobody changes it afterwards."""

    id: str
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # resolved: never None, never past the context
    # The answer so far, of an engine that is no more: output in every respect, and not told again. It has not ended.
    given: list[int] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)  # EOS (unless ignored) and the user's own
    eos_token_id: int | None = None  # the one that finishes with stop_reason None
    seed: int = 0  # resolved: the user's, or drawn at random
    priority: int = 0  # lower runs first
    arrival: float = 0.0  # seconds, time.time()
    constraint: Constraint | None = None
    lora: str | None = None
    cache_salt: str | None = None  # part of the prefix-cache key
    media_hashes: list[bytes] = msgspec.field(default_factory=list)  # part of the prefix-cache key
    pooling: Pooling | None = None  # a vector is wanted, not an answer: nothing is sampled
    prompt_embeds: np.ndarray | None = None  # float32 [prompt tokens, hidden], in place of those of `token_ids`
    trace: dict[str, str] | None = None
