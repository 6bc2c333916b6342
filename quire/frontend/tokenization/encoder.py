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
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.foundation.async_forks import MAX_TRIES
from quire.foundation.errors import ContextLengthError, InputError, OverloadedError, QuireError
from quire.foundation.fork_server import Limits
from quire.foundation.kept_bodies import BodyServer, KeptBody, KeptElsewhere
from quire.foundation.value_pieces import Pieces, pieces_of
from quire.frontend.pooling.prompts import Pair, PairEncoder
from quire.frontend.pooling.requests import PoolingPrompt
from quire.frontend.text import check_text
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.frontend.tokenization.truncation import FIELD, NO_TRUNCATION, Side, Truncation, check_length, encode_texts
from quire.types.request import TokenIds, token_array

SHORT = 8 * 1024  # bytes of all texts that are encoded in place
LONG = 48 * 1024  # more are encoded in a fork: as lists of numbers their ids would hold up others
MAX_CHAR = 4  # bytes
_SENT = 16 * 1024  # characters that are sent to a fork at a time
PIECE = 1024 * 1024  # characters that one fork encodes, unless they are one text
WIDTH = max(1, min(4, (os.cpu_count() or 1) // 4))  # threads at a time, and forks
MAX_WAITING = 1024  # requests
LIMITS = Limits(cpu_seconds=60, wall_seconds=600.0, memory_bytes=2 * 1024**3, forks=WIDTH)

T = TypeVar("T")


class _Question(msgspec.Struct, frozen=True, array_like=True):
    sizes: list[int]  # bytes of each text
    limit: int | None
    side: Side
    add_special_tokens: bool
    keep: int | None  # ids of a text that has more tokens are not sent


class TakesLongError(Exception):
    """There is more to encode than was allowed."""


class TextEncoder:
    """Used on one event loop. context: tokens (max_model_len). is_alone: nobody is held up by what is done here."""

    def __init__(self, tokenizer: Tokenizer, context: int, *, is_alone: bool = False) -> None:
        self.tokenizer = tokenizer
        self._is_alone = is_alone
        self.at_once: int | None = None  # characters that one who is alone may encode
        self._context = context
        self._threads = asyncio.Semaphore(WIDTH)
        self._forks = KeptElsewhere(
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
        if self._is_alone or sum(len(a) + len(b) for a, b in pairs) <= SHORT:
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
        if self.at_once is not None and sum(map(len, texts)) > self.at_once:
            raise TakesLongError
        size = 0 if self._is_alone else sum(map(_num_bytes, texts))
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
                result = await self._in_fork(batch, cut, keep, add_special_tokens=add_special_tokens)
                if isinstance(result, str):
                    raise InputError(result, FIELD)
                found += map(tuple, result)
        finally:
            self._num_waiting -= 1
        return found

    async def _in_fork(
        self, texts: Sequence[str], cut: Truncation, keep: int | None, *, add_special_tokens: bool
    ) -> Any:
        """Number and ids of each text, or what is wrong with all."""
        for number in range(1, MAX_TRIES + 1):
            body = await self._forks.open()
            try:
                sizes = [await _send(body, text) for text in texts]
                question = _Question(sizes, cut.limit, cut.side, add_special_tokens, keep)
                return await body.ask(msgspec.msgpack.encode(question), Pieces())
            except ConnectionError:
                if number == MAX_TRIES:
                    raise QuireError("the process that encodes long texts has ended") from None
            except EOFError:
                raise InputError(
                    f"prompt takes more than {LIMITS.memory_bytes // 1024**2} MiB of memory or "
                    f"{LIMITS.cpu_seconds} s of processor time to tokenize",
                    "prompt",
                ) from None
            finally:
                body.close()
        raise AssertionError


def _num_bytes(text: str) -> int:
    """At most, of one that is not ASCII."""
    return len(text) if text.isascii() else MAX_CHAR * len(text)


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


async def _send(body: KeptBody, text: str) -> int:
    """Its size in bytes. Raises InputError for one that is not valid Unicode."""
    size = 0
    for start in range(0, len(text), _SENT):
        try:
            part = text[start : start + _SENT].encode()
        except UnicodeEncodeError:
            check_text(text, "prompt")
            raise
        size += len(part)
        await body.add(part)
    return size


def _work(tokenizer: Tokenizer, asked: bytes, body: bytearray) -> Iterator[bytes]:
    """In a fork."""
    question = msgspec.msgpack.decode(asked, type=_Question)
    ends = list(accumulate(question.sizes, initial=0))
    texts = [body[start:end].decode() for start, end in pairwise(ends)]
    cut, keep = Truncation(question.limit, question.side), question.keep
    try:
        found = encode_texts(tokenizer, texts, cut, add_special_tokens=question.add_special_tokens)
    except InputError as error:
        return pieces_of(error.message)
    return pieces_of([[len(ids), token_array(ids) if keep is None or len(ids) <= keep else None] for ids in found])


def _serve(descriptor: int, folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    answer = partial(_work, tokenizer)
    BodyServer(socket.socket(fileno=descriptor), answer, LIMITS).run()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]))
