"""Answers without a model: each token is drawn from what the mask allows."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np

import quire
from quire.grammar.base import Backend, Matcher
from quire.grammar.vocabulary import Vocabulary
from quire.types.structured import GRAMMAR_BACKENDS

DEMO_MODEL = Path(quire.__file__).parent / "demo_model"


@cache
def demo(name: str = "llguidance") -> Backend:
    found: Backend = GRAMMAR_BACKENDS.get(name)(Vocabulary(DEMO_MODEL, 4096, [2, 0]))
    return found


def allowed(backend: Backend, matcher: Matcher, budget: int | None = None) -> list[int]:
    row = np.zeros(-(-backend.vocabulary.size // 32), np.int32)
    if budget is None:
        matcher.fill(row)
    else:
        backend.close_soon(matcher, budget, row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def answer(
    backend: Backend, matcher: Matcher, rng: random.Random, budget: int, *, close_at_limit: bool = False
) -> tuple[bytes, bool]:
    """The text of at most `budget` tokens, and whether it is complete."""
    text = b""
    for left in range(budget, 0, -1):
        tokens = allowed(backend, matcher, left if close_at_limit else None)
        assert tokens, f"nothing may follow {text!r}"
        token = rng.choice(tokens)
        assert matcher.accept(token), f"token {token} was allowed after {text!r}, and then not"
        text += backend.vocabulary.tokens[token]
        if matcher.is_done:
            return text, True
    return text, matcher.may_end


def takes(backend: Backend, matcher: Matcher, text: str) -> bool:
    """Whether `text` as a whole is an answer, byte by byte."""
    by_byte = {token[0]: i for i, token in enumerate(backend.vocabulary.tokens) if len(token) == 1}
    return all(matcher.accept(by_byte[byte]) for byte in text.encode()) and matcher.may_end
