"""Names for the content of KV blocks.

The KV of a block depends on every token before it, so a block's hash chains over its predecessor's:
`h[i] = sha256(h[i-1] + tokens of block i)`, and `h[-1]` covers a secret of the process and everything besides the
tokens that changes the KV (adapter, media) or that must keep tenants apart (salt). Two blocks with one hash may be
shared without comparing tokens; with 256 bits and a secret root nobody can forge a collision.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

ROOT_BYTES = 32


def new_root(seed: bytes | None = None) -> bytes:
    """The start of all chains: random for the life of the process, or derived from `seed` to be the same elsewhere."""
    return secrets.token_bytes(ROOT_BYTES) if seed is None else hashlib.sha256(seed).digest()


def extra_key(lora: str | None, cache_salt: str | None, media_hashes: Sequence[bytes]) -> bytes:
    """What besides the tokens tells two requests' KV apart, as bytes that no other combination has."""
    if lora is None and cache_salt is None and not media_hashes:
        return b""
    return msgspec.msgpack.encode((lora, cache_salt, list(media_hashes)))


def extend_hashes(hashes: list[bytes], tokens: array[int], num_blocks: int, block_size: int, parent: bytes) -> None:
    """Grow `hashes` until it names the first `num_blocks` blocks of `tokens` (int32; these blocks must be full).

    parent: the last of `hashes`, or the start of the chain if there is none yet.
    """
    known = len(hashes)
    data = tokens[known * block_size : num_blocks * block_size].tobytes()
    stride = block_size * tokens.itemsize
    for i in range(0, len(data), stride):
        parent = hashlib.sha256(parent + data[i : i + stride]).digest()
        hashes.append(parent)


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


def chain_start(root: bytes, extra: bytes) -> bytes:
    """The parent of a request's first block."""
    return hashlib.sha256(root + extra).digest()
