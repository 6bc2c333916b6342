"""Texts that a grammar allows, drawn at random under xgrammar's masks: a model that knows nothing but must obey."""

from __future__ import annotations

import random

import numpy as np
import xgrammar

from quire.types.structured import GrammarSpec

_WORDS = [" the", "name", "arg", "foo", "Ünï", "日本", '": ', "true", "12", "\n  "]
_CLOSERS = frozenset((b'"', b"}", b"]", b")", b"<", b"\n"))


class RandomWalks:
    """Over a vocabulary of all bytes, some words and `markers`, which are drawn more often than by chance."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        vocabulary = [bytes([byte]) for byte in range(256)] + [word.encode() for word in (*_WORDS, *markers)]
        self._markers = frozenset(marker.encode() for marker in markers)
        self._stop = len(vocabulary)
        self._vocabulary = [*vocabulary, b"</s>"]
        info = xgrammar.TokenizerInfo(self._vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[self._stop])
        self._compiler = xgrammar.GrammarCompiler(info)
        self._bitmask = xgrammar.allocate_token_bitmask(1, len(self._vocabulary))

    def compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_structural_tag(spec.text)

    def draw(self, grammar: xgrammar.CompiledGrammar, rng: random.Random, limit: int = 1500) -> str | None:
        """A whole text; None if it does not end within `limit` tokens."""
        matcher = xgrammar.GrammarMatcher(grammar)
        text = b""
        for _ in range(limit):
            matcher.fill_next_token_bitmask(self._bitmask)
            bits = np.unpackbits(self._bitmask.numpy().view(np.uint8), bitorder="little")[: len(self._vocabulary)]
            allowed = [int(token) for token in np.flatnonzero(bits)]
            assert allowed, f"nothing may follow {text!r}"
            if allowed[-1] == self._stop and (len(allowed) == 1 or rng.random() < 0.1):
                return text.decode(errors="replace")
            token = self._choose([token for token in allowed if token != self._stop], rng)
            assert matcher.accept_token(token)
            text += self._vocabulary[token]
        return None

    def _choose(self, allowed: list[int], rng: random.Random) -> int:
        """Characters that lead on are preferred, and ASCII."""
        for chance, group in (
            (0.15, [token for token in allowed if self._vocabulary[token] in self._markers]),
            (0.45, [token for token in allowed if self._vocabulary[token] in _CLOSERS]),
            (0.95, [token for token in allowed if 32 <= token < 127 or token > 255]),
        ):
            if group and rng.random() < chance:
                return rng.choice(group)
        return rng.choice(allowed)
