"""Texts that a grammar allows, drawn at random under its masks: a model that knows nothing but must obey."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from quire.grammar.base import CompiledGrammar
from quire.grammar.llguidance.backend import LLGuidance
from quire.types.structured import GrammarSpec

_WORDS = [" the", "name", "arg", "foo", "Ünï", "日本", '": ', "true", "12", "\n  "]
_CLOSERS = frozenset((b'"', b"}", b"]", b")", b"<", b"\n"))


class _Vocabulary:
    """All bytes, some words and `markers`, as special tokens or as any others."""

    def __init__(self, markers: Sequence[str], are_special: bool) -> None:
        words = [bytes([byte]) for byte in range(256)] + [word.encode() for word in _WORDS]
        self.markers = range(len(words), len(words) + len(markers))
        self.names = [*words, *(marker.encode() for marker in markers)]
        self.special = dict(zip(markers, self.markers, strict=True)) if are_special else {}
        stop = len(self.names)
        self.tokens = [b"" if are_special and i in self.markers else name for i, name in enumerate(self.names)] + [b""]
        self.size = len(self.tokens)
        self.stop_ids = [stop]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class RandomWalks:
    def __init__(self, markers: Sequence[str] = (), *, are_special: bool = False) -> None:
        self._vocabulary = _Vocabulary(markers, are_special)
        self._backend = LLGuidance(self._vocabulary)  # type: ignore[arg-type]

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return self._backend.compile(spec)

    def draw(self, grammar: CompiledGrammar, rng: random.Random, limit: int = 1500) -> str | None:
        """A whole text; None if it does not end within `limit` tokens."""
        vocabulary = self._vocabulary
        row = np.zeros(-(-vocabulary.size // 32), np.int32)
        matcher = grammar.matcher()
        text = b""
        for _ in range(limit):
            matcher.fill(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            assert allowed, f"nothing may follow {text!r}"
            others = [token for token in allowed if token not in vocabulary.stop_ids]
            if not others or (len(others) < len(allowed) and rng.random() < 0.1):
                return text.decode(errors="replace")
            token = self._choose(others, rng)
            assert matcher.accept(token), f"{vocabulary.names[token]!r} was allowed after {text!r}"
            text += vocabulary.names[token]
        return None

    def _choose(self, allowed: list[int], rng: random.Random) -> int:
        """Characters that lead on are preferred, and ASCII."""
        names = self._vocabulary.names
        for chance, group in (
            (0.15, [token for token in allowed if token in self._vocabulary.markers]),
            (0.45, [token for token in allowed if names[token] in _CLOSERS]),
            (0.95, [token for token in allowed if 32 <= token < 127 or token > 255]),
        ):
            if group and rng.random() < chance:
                return rng.choice(group)
        return rng.choice(allowed)
