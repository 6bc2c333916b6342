"""Many masks at once are those that the library gives one by one, whatever is kept and however many threads there are;
and who fails fails alone."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from quire.grammar.finite_numbers import DigitLimit, DigitTable
from quire.grammar.json_schema.normalize import plain
from quire.grammar.llguidance import backend as llguidance
from quire.grammar.llguidance.backend import LLGrammar, LLGuidance, LLGuidanceMatcher
from quire.types.structured import GrammarSpec
from tests.grammar.schemas import make_schema
from tests.grammar.walk import demo

REGEXES = [
    "([a-z]+ ){5,}",
    "[^x]{3,40}",
    ".{1,40}",
    "(.|\n)*",
    r"(\w+[ ,.]){2,9}(the end|THE END)",
    "([^é]é?){4,}",
    "^[日本a-z ]+$",
    "(a|[a-c]{2,}){3}z*",
]
SPECS = [GrammarSpec("regex", pattern) for pattern in REGEXES] + [
    GrammarSpec("json_schema", plain(make_schema(seed), "json")) for seed in range(60)
]


@pytest.fixture(scope="module")
def backend() -> LLGuidance:
    return LLGuidance(demo().vocabulary, num_threads=3)


class Alone:
    """One answer followed by the library itself, without anything of ours but the limit to numbers."""

    def __init__(self, backend: LLGuidance, spec: GrammarSpec) -> None:
        self._backend = backend
        self._matcher = LLMatcher(
            backend._tokenizer, backend.recipe(spec).source, log_level=0, limits=llguidance._LIMITS
        )
        self._digits = DigitLimit(DigitTable(backend.vocabulary.tokens)) if spec.kind == "json_schema" else None

    def take(self, token: int) -> None:
        assert self._matcher.consume_token(token)
        if self._digits is not None:
            self._digits.push(token)

    def mask(self) -> np.ndarray:
        row = np.zeros(-(-self._backend.vocabulary.size // 32), np.int32)
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._digits is not None:
            self._digits.cut(row)
        return row


def fill(backend: LLGuidance, matchers: Sequence[LLGuidanceMatcher]) -> np.ndarray:
    rows = np.full((len(matchers), -(-backend.vocabulary.size // 32)), -1, np.int32)  # as if of a step before
    backend.fill(matchers, rows)
    return rows


def wait_for_roots(grammar: LLGrammar, count: int) -> None:
    while len(grammar.copies) < count:
        time.sleep(0.001)


def draw(rng: random.Random, row: np.ndarray) -> int:
    return int(rng.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()))


@pytest.mark.parametrize("part", range(4))
def test_masks_made_together_are_those_made_alone(backend: LLGuidance, part: int) -> None:
    """Five answers under each of several grammars, of which three begin later; two follow one text."""
    specs = SPECS[part::4]
    rng = random.Random(3)
    grammars = [backend.compile(spec) for spec in specs]
    matchers = [grammar.matcher() for grammar in grammars for _ in range(5)]
    others = [Alone(backend, grammar.spec) for grammar in grammars for _ in range(5)]
    for grammar in grammars:
        wait_for_roots(grammar, 3)
    texts: dict[int, int] = {}  # who goes with whom
    for step in range(16):
        awake = [n for n in range(len(matchers)) if n % 5 < 2 or step > 3]
        rows = fill(backend, [matchers[n] for n in awake])
        for n, row in zip(awake, rows, strict=True):
            if matchers[n].is_done:
                continue
            alone = others[n].mask()
            assert (row == alone).all(), f"{matchers[n].grammar.spec} at step {step}"
            one = np.empty_like(row)
            matchers[n].fill(one)
            assert (one == alone).all()
            token = texts[n - 1] if n % 5 == 1 and n - 1 in texts else draw(rng, row)
            texts[n] = token
            assert matchers[n].accept(token)
            if not matchers[n].has_ended:
                others[n].take(token)
    assert len(backend._masks._rows) > 5, "no mask was kept"


def test_answers_spread_over_roots_and_leave_them(backend: LLGuidance) -> None:
    grammar = backend.compile(GrammarSpec("regex", "[ab]+"))
    assert len(grammar.copies) == 1
    matchers = [grammar.matcher() for _ in range(9)]
    wait_for_roots(grammar, 3)
    a = backend.vocabulary.tokens.index(b"a")
    assert all(matcher.accept(a) for matcher in matchers)
    used = [matcher.shared for matcher in matchers]
    assert all(used.count(shared) == 3 for shared in used)
    free = matchers[0].shared
    matchers = [matcher for matcher in matchers if matcher.shared is not free]
    late = [grammar.matcher() for _ in range(3)]
    assert all(matcher.accept(a) for matcher in late)
    assert all(matcher.shared is free for matcher in late)


def test_one_answer_needs_no_threads() -> None:
    backend = LLGuidance(demo().vocabulary, num_threads=3)
    grammar = backend.compile(GrammarSpec("json_object", ""))
    matcher = grammar.matcher()
    rng = random.Random(0)
    for _ in range(5):
        assert matcher.accept(draw(rng, fill(backend, [matcher])[0]))
    assert len(grammar.copies) == 1
    assert backend._executor is None
    assert not backend._builder._threads


def test_what_is_large_is_built_once(backend: LLGuidance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "MAX_COPY_SECONDS", 0.0)
    grammar = backend.compile(GrammarSpec("regex", "[ab]+"))
    matchers = [grammar.matcher() for _ in range(9)]
    rng = random.Random(0)
    for _ in range(3):
        assert all(
            matcher.accept(draw(rng, row)) for matcher, row in zip(matchers, fill(backend, matchers), strict=True)
        )
        matchers = [matcher for matcher in matchers if not matcher.is_done]
    assert len(grammar.copies) == 1


@pytest.mark.parametrize("num_threads", [1, 3])
def test_who_fails_fails_alone(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    """With so little fuel that some rows cannot be computed, the others are what they are with enough."""
    backend = LLGuidance(demo().vocabulary, num_threads=num_threads)
    enough = [backend.compile(spec) for spec in SPECS[:4]]
    limits: Any = LLParserLimits(step_lexer_fuel=20_000, verbose_errors=False)
    monkeypatch.setattr(llguidance, "_LIMITS", limits)
    costly = GrammarSpec("regex", r"(([a-f]|[c-k]x?){1,9}[ -]?){2,20}(a|b|ab){5}z")
    poor = backend.compile(costly)
    matchers = [grammar.matcher() for grammar in [*enough, poor] for _ in range(3)]
    for grammar in (*enough, poor):
        wait_for_roots(grammar, num_threads)
    rng, failed = random.Random(1), 0
    for _ in range(12):
        rows = fill(backend, matchers)
        for n, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            if matcher.inner.is_error():
                assert n >= 12
                assert not row.any()
                failed += 1
            elif not matcher.is_done:
                assert matcher.accept(draw(rng, row))
    assert failed
    while any(shared.has_failed for shared in poor.copies._copies):
        time.sleep(0.001)
    late = poor.matcher()  # what failed does not make others fail that begin now
    token = draw(rng, fill(backend, [late])[0])
    assert late.accept(token)
    assert fill(backend, [late])[0].any()
