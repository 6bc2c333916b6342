"""Where texts are encoded: in place, on a thread, or in a process. Those that are too long are not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.foundation.errors import ContextLengthError, InputError, OverloadedError
from quire.frontend.text import most_chars
from quire.frontend.tokenization import encoder
from quire.frontend.tokenization.encoder import LONG, TextEncoder
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.frontend.tokenization.truncation import Truncation, encode_texts
from quire.types.request import token_list
from tests.server.process import PATIENCE

CONTEXT = 4096
WORDS = "The quick brown fox, Größe and 世界 👋🏽. "


def text_of(length: int) -> str:
    """Some of its characters take several bytes: each counts as four."""
    return (WORDS * (length // len(WORDS) + 1))[:length]


def run(tokenizer: Tokenizer, call: Callable[[TextEncoder], Awaitable[Any]], context: int = CONTEXT) -> Any:
    async def work() -> Any:
        return await call(TextEncoder(tokenizer, context))

    return asyncio.run(work())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Characters that this process encodes, and on which thread."""
    found: list[tuple[int, str]] = []
    encode = encode_texts

    def spy(tokenizer: Tokenizer, texts: Sequence[str], *args: Any, **kwargs: Any) -> list[list[int]]:
        here = threading.current_thread() is threading.main_thread()
        found.append((sum(map(len, texts)), "loop" if here else "thread"))
        return encode(tokenizer, texts, *args, **kwargs)

    monkeypatch.setattr(encoder, "encode_texts", spy)
    return found


def test_long_texts_are_encoded_elsewhere_and_alike(
    fallback_tokenizer: Tokenizer, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = fallback_tokenizer  # it puts <s> in front
    short, long = 1000, 10_000
    monkeypatch.setattr(encoder, "SHORT", short)
    monkeypatch.setattr(encoder, "LONG", long)
    monkeypatch.setattr(encoder, "PIECE", 2 * long)
    sizes = [(short // 4, "loop"), (short // 4 + 1, "thread"), (long // 4, "thread"), (long // 4 + 1, None)]

    async def ask(encoder: TextEncoder) -> None:
        for size, where in sizes:
            text = text_of(size)
            for cut in (Truncation(), Truncation(7, "left"), Truncation(7, "right")):
                seen.clear()
                for special in (False, True):
                    found = await encoder.encode([text], cut, add_special_tokens=special)
                    assert [isinstance(ids, np.ndarray) for ids in found] == [where != "loop"]
                    assert [token_list(ids) for ids in found] == encode_texts(
                        tokenizer, [text], cut, add_special_tokens=special
                    )
                assert seen == ([] if where is None else [(size, where)] * 2)
            assert (encoder.pid is None) == (where is not None)
            ids = await encoder.tokens(text, add_special_tokens=True)
            assert list(ids) == tokenizer.encode(text)
            assert await encoder.count(text, add_special_tokens=True) == len(ids)
        many = [text_of(long // 2)] * 7 + ["", "short"]
        found = await encoder.encode(many, add_special_tokens=True)
        assert [token_list(ids) for ids in found] == tokenizer.encode_batch(many)

    run(tokenizer, ask)


def test_what_is_too_long_whatever_its_tokens_are_is_never_encoded(tokenizer: Tokenizer, seen: list[Any]) -> None:
    most = tokenizer.most_characters
    assert most is not None

    async def ask(encoder: TextEncoder) -> int | None:
        for text in ("a" * 30_000_000, "a" * (most * 100 + 1)):
            with pytest.raises(ContextLengthError, match=f"tokens > 100 maximum, or more: it has {len(text)} char"):
                await encoder.encode([text], add_special_tokens=False, most=100)
        with pytest.raises(ContextLengthError, match="characters"):  # of one that is cut, or only counted
            await encoder.encode(["a" * 30_000_000], Truncation(5), add_special_tokens=False, most=100)
        with pytest.raises(ContextLengthError, match=f"30000000 characters > {most_chars(CONTEXT)} maximum"):
            await encoder.count("a" * 30_000_000, add_special_tokens=False)
        return encoder.pid

    assert run(tokenizer, ask) is None
    assert seen == []


def test_ids_that_no_context_holds_are_counted_and_not_sent(tokenizer: Tokenizer) -> None:
    text = text_of(LONG + 1)
    number = len(tokenizer.encode(text))

    async def ask(encoder: TextEncoder) -> None:
        with pytest.raises(ContextLengthError, match=f"{number} tokens > {number - 1} maximum"):
            await encoder.encode([text], add_special_tokens=True, most=number - 1)
        assert len((await encoder.encode([text], add_special_tokens=True, most=number))[0]) == number

    run(tokenizer, ask, context=number)


def test_limits_of_a_cut_are_refused_from_the_process_too(fallback_tokenizer: Tokenizer) -> None:
    async def ask(encoder: TextEncoder) -> None:
        with pytest.raises(InputError, match="special tokens around"):
            await encoder.encode([text_of(LONG + 1)], Truncation(1), add_special_tokens=True)

    run(fallback_tokenizer, ask)


def forks(pid: int | None) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts processes as Linux tells them")
def test_a_fork_ends_with_its_text_and_when_nobody_waits(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(1_000_000)

    async def ask(encoder: TextEncoder) -> None:
        await encoder.count(text_of(LONG + 1), add_special_tokens=True)
        assert forks(encoder.pid) == []  # and its memory with it
        monkeypatch.setattr("quire.frontend.tokenization.encoder.MAX_WAITING", 3)
        waiting = [asyncio.create_task(encoder.count(text, add_special_tokens=True)) for _ in range(3)]
        while not forks(encoder.pid):
            await asyncio.sleep(0.001)
        with pytest.raises(OverloadedError):
            await encoder.count(text, add_special_tokens=True)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        async with asyncio.timeout(PATIENCE):
            while forks(encoder.pid):
                await asyncio.sleep(0.001)

    run(tokenizer, ask)
