"""Texts → token ids for a server: whatever takes long is done where it holds up nobody.

Short texts are encoded in place, longer ones on a thread without the interpreter's lock, and still longer ones in a
fork of a process that has the tokenizer loaded (`foundation/fork_server.py`): at a lower priority, ended when nobody
waits any more, and its memory is the machine's again with its end. A text that is too long whatever its tokens are is
not encoded at all.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from quire.foundation import aside
from quire.foundation.async_forks import AsyncForks
from quire.foundation.errors import ContextLengthError, InputError, OverloadedError
from quire.foundation.fork_server import ForkServer, Limits
from quire.frontend.pooling.prompts import Pair, PairEncoder
from quire.frontend.pooling.requests import PoolingPrompt
from quire.frontend.text import check_text
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.frontend.tokenization.truncation import FIELD, NO_TRUNCATION, Side, Truncation, check_length, encode_texts
from quire.types.request import TokenIds, token_array

SHORT = aside.LONG  # characters of all texts that are encoded in place
LONG = 256 * 1024  # more are encoded in a fork
PIECE = 1024 * 1024  # characters that one fork encodes, unless they are one text
WIDTH = max(1, min(4, (os.cpu_count() or 1) // 4))  # threads at a time, and forks
MAX_WAITING = 64  # requests
LIMITS = Limits(cpu_seconds=60, wall_seconds=600.0, memory_bytes=2 * 1024**3, forks=WIDTH)

T = TypeVar("T")


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    texts: list[str]
    limit: int | None
    side: Side
    add_special_tokens: bool
    keep: int | None  # ids of a text that has more tokens are not sent


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    count: int
    ids: bytes | None  # int32


class TextEncoder:
    """Used on one event loop. context: tokens (max_model_len)."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self.tokenizer = tokenizer
        self._context = context
        self._threads = asyncio.Semaphore(WIDTH)
        self._forks = AsyncForks(
            "quire.frontend.tokenization.encoder", str(tokenizer.folder), TOKENIZERS_PARALLELISM="false"
        )
        self._num_waiting = 0

    @property
    def pid(self) -> int | None:
        """Of the process that forks, once it was needed."""
        return self._forks.pid

    async def encode(
        self,
        texts: Sequence[str],
        cut: Truncation = NO_TRUNCATION,
        *,
        add_special_tokens: bool,
        most: int | None = None,
    ) -> list[TokenIds]:
        """The ids of each text, of long ones as arrays int32. most: tokens that each may have; None: any number.

        Raises InputError for a text that has more or is too long to be encoded, OverloadedError if too many wait.
        """
        found = []
        for count, ids in await self._encode(texts, cut, most, most, add_special_tokens=add_special_tokens):
            if most is not None and count > most:
                raise ContextLengthError.of(count, self._context - most, self._context)
            assert ids is not None
            found.append(ids)
        return found

    async def tokens(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """The ids of a text however many they are; of a long one an array int32 [tokens]."""
        [(_, ids)] = await self._encode([text], NO_TRUNCATION, None, None, add_special_tokens=add_special_tokens)
        assert ids is not None
        return ids

    async def count(self, text: str, *, add_special_tokens: bool) -> int:
        """Tokens of a text however many they are."""
        [(count, _)] = await self._encode([text], NO_TRUNCATION, None, 0, add_special_tokens=add_special_tokens)
        return count

    async def encode_pairs(self, encoder: PairEncoder, pairs: Sequence[Pair]) -> list[PoolingPrompt]:
        """The prompts of pairs. Raises InputError."""
        if sum(len(a) + len(b) for a, b in pairs) <= SHORT:
            return encoder.encode(pairs)
        found: list[PoolingPrompt] = []
        for batch in _batches(pairs, LONG, lambda pair: len(pair[0]) + len(pair[1])):
            async with self._threads:
                found += await asyncio.to_thread(encoder.encode, batch)
        return found

    async def _encode(
        self, texts: Sequence[str], cut: Truncation, most: int | None, keep: int | None, *, add_special_tokens: bool
    ) -> list[tuple[int, TokenIds | None]]:
        """Number and ids of the tokens of each text; no ids of one with more than `keep` that was not encoded here."""
        for text in texts:
            check_length(self.tokenizer, text, self._context, most, is_cut=cut.limit is not None)
        size = sum(map(len, texts))
        if size > LONG:
            return await self._in_forks(texts, cut, keep, add_special_tokens=add_special_tokens)

        def here(convert: Callable[[list[int]], TokenIds]) -> list[tuple[int, TokenIds | None]]:
            found = encode_texts(self.tokenizer, texts, cut, add_special_tokens=add_special_tokens)
            return [(len(ids), convert(ids)) for ids in found]

        if size <= SHORT:
            return here(lambda ids: ids)
        async with self._threads:
            return await asyncio.to_thread(here, token_array)

    async def _in_forks(
        self, texts: Sequence[str], cut: Truncation, keep: int | None, *, add_special_tokens: bool
    ) -> list[tuple[int, TokenIds | None]]:
        """One fork after the other, so that a request with much to encode does not keep others from theirs."""
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} requests with long texts wait to be tokenized")
        self._num_waiting += 1
        found: list[tuple[int, TokenIds | None]] = []
        try:
            for batch in _batches(texts, PIECE, len):
                for text in batch:
                    check_text(text, "prompt")
                piece = _Piece(batch, cut.limit, cut.side, add_special_tokens, keep)
                answer = await self._forks.ask(msgspec.msgpack.encode(piece))
                if not answer:
                    raise InputError(
                        f"prompt takes more than {LIMITS.memory_bytes // 1024**2} MiB of memory or "
                        f"{LIMITS.cpu_seconds} s of processor time to tokenize",
                        "prompt",
                    )
                result = msgspec.msgpack.decode(answer, type=list[_Encoded] | str)
                if isinstance(result, str):
                    raise InputError(result, FIELD)
                found += [(one.count, None if one.ids is None else np.frombuffer(one.ids, np.int32)) for one in result]
        finally:
            self._num_waiting -= 1
        return found


def _batches(items: Sequence[T], most: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """In order, in batches of one item or of at most `most` together."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + size_of(item) > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch


def _work(tokenizer: Tokenizer, body: bytes) -> bytes:
    """In a fork."""
    piece = msgspec.msgpack.decode(body, type=_Piece)
    cut = Truncation(piece.limit, piece.side)
    try:
        found = encode_texts(tokenizer, piece.texts, cut, add_special_tokens=piece.add_special_tokens)
    except InputError as error:
        return msgspec.msgpack.encode(error.message)
    keep = piece.keep
    return msgspec.msgpack.encode(
        [_Encoded(len(ids), token_array(ids).tobytes() if keep is None or len(ids) <= keep else None) for ids in found]
    )


def _serve(descriptor: int, folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ForkServer(socket.socket(fileno=descriptor), lambda body: _work(tokenizer, body), LIMITS).run()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]))
