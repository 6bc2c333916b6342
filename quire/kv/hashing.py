"""Names for the content of KV blocks.

The KV of a block depends on every token before it, so a block is named by all tokens up to its end, and by everything
besides them that changes the KV (adapter, media) or that must keep tenants apart (salt). Two blocks with one name may
be shared without comparing tokens: the name is a keyed hash whose key is a secret of the process.

A name is four sums modulo 2^64 over the tokens t[0], t[1], …: `start[l] + Σ key[i + l] · (t[i] + 1)`, l = 0 … 3. So the
names of all blocks of a prompt are a few operations on arrays, and a name holds all that the next one continues.
Whoever does not know the key, however two beginnings are chosen, gives both one name with a probability of at most
2^-132. Where they differ last, the difference of the tokens has at most 31 factors of 2, so a sum agrees for 2^31 of
the 2^64 values of the key's number there, and each l has one there that no smaller l has used (multilinear hashing of
M. Dietzfelbinger; shifted keys of H. Krawczyk). Names never leave the process, and of the key a client learns from hits
only that nothing collided.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

NAME_BYTES = 32
_LANES = NAME_BYTES // 8
_FIRST_KEYS = 1 << 14  # numbers
_ONE = np.uint64(1)


def extra_key(lora: str | None, cache_salt: str | None, media_hashes: Sequence[bytes]) -> bytes:
    """What besides the tokens tells two requests' KV apart, as bytes that no other combination has."""
    if lora is None and cache_salt is None and not media_hashes:
        return b""
    return msgspec.msgpack.encode((lora, cache_salt, list(media_hashes)))


class BlockHasher:
    """Names blocks. seed: the same names in every process that has it, which must be a secret; None draws one."""

    def __init__(self, seed: bytes | None = None) -> None:
        self._root = secrets.token_bytes(32) if seed is None else hashlib.sha256(seed).digest()
        self._keys = self._lanes(_FIRST_KEYS)

    def extend(self, hashes: list[bytes], tokens: array[int], num_blocks: int, block_size: int, extra: bytes) -> None:
        """Grow `hashes` until it names the first `num_blocks` blocks of `tokens` (int32; these blocks must be full).

        extra: of the request; see `extra_key`.
        """
        begin, end = len(hashes) * block_size, num_blocks * block_size
        if begin >= end:
            return
        if end > self._keys.shape[1]:
            self._keys = self._lanes(1 << (end - 1).bit_length())
        numbers = np.frombuffer(tokens, np.int32, end - begin, 4 * begin).astype(np.uint64)
        numbers += _ONE  # 0 is no token: beginnings of different lengths differ
        keys = self._keys[:, begin:end].reshape(_LANES, -1, block_size)
        sums = np.ascontiguousarray(np.einsum("lbi,bi->bl", keys, numbers.reshape(-1, block_size)))
        sums[0] += np.frombuffer(hashes[-1] if hashes else self._start(extra), np.uint64)
        np.cumsum(sums, axis=0, out=sums)
        hashes += sums.view(f"V{NAME_BYTES}").ravel().tolist()

    def _start(self, extra: bytes) -> bytes:
        return hashlib.sha256(self._root + extra).digest()

    def _lanes(self, count: int) -> np.ndarray:
        """uint64 [lanes, count]: the key as each lane reads it, a view of `count` numbers and a few more."""
        made = hashlib.shake_256(b"keys" + self._root).digest(8 * (count + _LANES))
        return np.lib.stride_tricks.sliding_window_view(np.frombuffer(made, np.uint64), count)[:_LANES]


class RecentChains:
    """The chains of the last few requests, for others that begin alike: tokens are compared far sooner than hashed.

    Found by the first block. It keeps the tokens and hashes of `capacity` requests alive.
    """

    def __init__(self, block_size: int, capacity: int = 16) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._chains: dict[tuple[bytes, bytes], tuple[array[int], list[bytes]]] = {}  # oldest first

    def common(self, extra: bytes, tokens: array[int]) -> list[bytes]:
        """Hashes of the leading blocks that `tokens` has in common with a chain kept."""
        known = self._chains.get(self._key(extra, tokens))
        if known is None:
            return []
        theirs, hashes = known
        count = min(len(tokens), len(theirs), len(hashes) * self._block_size)
        differ = np.frombuffer(tokens, np.int32, count) != np.frombuffer(theirs, np.int32, count)
        equal = int(differ.argmax()) if differ.any() else count
        return hashes[: equal // self._block_size]

    def keep(self, extra: bytes, tokens: array[int], hashes: list[bytes]) -> None:
        """Keep a chain in place of another one with its first block, or of the oldest. Both lists may grow."""
        key = self._key(extra, tokens)
        self._chains.pop(key, None)
        self._chains[key] = tokens, hashes
        if len(self._chains) > self._capacity:
            del self._chains[next(iter(self._chains))]

    def _key(self, extra: bytes, tokens: array[int]) -> tuple[bytes, bytes]:
        return extra, tokens[: self._block_size].tobytes()
