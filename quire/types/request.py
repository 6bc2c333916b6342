"""One request as the engine core sees it: token ids only, everything about text stays in the frontend."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import numpy as np

from quire.types.adapter import Adapter
from quire.types.pooling import Pooling
from quire.types.sampling import SamplingParams
from quire.types.structured import Constraint

TokenIds = Sequence[int] | np.ndarray  # a list while they are few or come from a user; see `token_array`
BACKGROUND = 2**62  # the priority of work that nobody waits for: behind all other requests, under every policy


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Built by `frontend.inputs.build`; nobody changes it afterwards."""

    id: str
    token_ids: np.ndarray  # int32 [prompt tokens]; see `token_array`
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
    lora: Adapter | None = None
    cache_salt: str | None = None  # part of the prefix-cache key
    media_hashes: list[bytes] = msgspec.field(default_factory=list)  # part of the prefix-cache key
    pooling: Pooling | None = None  # a vector is wanted, not an answer: nothing is sampled
    prompt_embeds: np.ndarray | None = None  # float32 [prompt tokens, hidden], in place of those of `token_ids`
    trace: dict[str, str] | None = None
    core: int | None = None  # of several the one that is to have it, while it lives; None: whichever


def token_array(ids: TokenIds) -> np.ndarray:
    """The column that token ids are from here on, int32 [tokens]. An array that is one already is not copied.

    Raises ValueError for what is no row of integers, or does not fit.
    """
    if not isinstance(ids, np.ndarray):
        try:
            column = bytearray(4 * len(ids))
            struct.pack_into(f"={len(ids)}i", column, 0, *ids)  # in half the time of array.array and NumPy's own ways
            return np.frombuffer(column, np.int32)
        except (TypeError, struct.error) as error:
            raise ValueError(str(error)) from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"an array of shape {ids.shape} and dtype {ids.dtype}")
    bounds = np.iinfo(np.int32)
    if len(ids) and ids.dtype != np.int32 and not bounds.min <= ids.min() <= ids.max() <= bounds.max:
        raise ValueError("token ids must be int32 integers")
    return np.ascontiguousarray(ids, np.int32)


def token_list(ids: TokenIds) -> list[int]:
    """As users know them. A list is not copied."""
    if isinstance(ids, np.ndarray):
        return ids.tolist()  # type: ignore[no-any-return]
    return ids if isinstance(ids, list) else list(ids)
