"""Whatever is drawn under the mask of a schema is JSON, and valid by the judgement of another library."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from quire.foundation.errors import InputError
from quire.grammar.json_schema.normalize import plain
from quire.types.structured import GrammarSpec
from tests.grammar.schemas import make_schema
from tests.grammar.walk import answer, demo

NUM_SCHEMAS = 120  # benchmarks/grammar.py takes any number
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def check(seed: int, backend_name: str = "llguidance") -> bool:
    """Whether the backend takes the schema; then its answers must be right."""
    backend, rng, schema = demo(backend_name), random.Random(seed), make_schema(seed)
    judge = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    try:
        grammar = backend.compile(GrammarSpec("json_schema", plain(schema, "json")))
    except InputError:
        assert backend_name != "llguidance", f"seed {seed}: the schema is refused"
        return False
    way = backend.way_to_end(grammar.matcher())
    assert way is not None, f"seed {seed}: no way to the end was found"
    budget = rng.randrange(len(way), len(way) + 150)
    closed, is_complete = answer(backend, grammar.matcher(), rng, budget, close_at_limit=True)
    assert is_complete, f"seed {seed}: {closed!r} was not closed within {budget} tokens, where {len(way)} are enough"
    judge.validate(json.loads(closed))
    free, is_complete = answer(backend, grammar.matcher(), rng, 200)
    if is_complete:
        judge.validate(json.loads(free))
    return True


@pytest.mark.parametrize("first", range(0, NUM_SCHEMAS, 20))
def test_answers_are_valid(first: int) -> None:
    assert all(check(seed) for seed in range(first, first + 20))


@pytest.mark.parametrize("first", range(0, NUM_SCHEMAS, 60))
def test_answers_by_xgrammar_are_valid(first: int) -> None:
    assert sum(check(seed, "xgrammar") for seed in range(first, first + 60)) > 10


def test_none_means_no_whitespace() -> None:
    backend, rng = demo(), random.Random(0)
    spec = GrammarSpec("json_schema", plain(make_schema(3), "json"), whitespace="none")
    for _ in range(5):
        text, is_complete = answer(backend, backend.compile(spec).matcher(), rng, 60, close_at_limit=True)
        assert is_complete
        value = json.loads(text)
        assert json.loads(json.dumps(value, separators=(",", ":"))) == value
        assert not any(c in "\n\t\r" for c in text.decode())


def test_whitespace_is_bounded_and_a_pattern_counts() -> None:
    backend = demo()
    space, newline = (backend.vocabulary.tokens.index(text) for text in (b" ", b"\n"))
    spec = GrammarSpec("json_schema", '{"type":"array"}')
    matcher = backend.compile(spec).matcher()
    assert matcher.accept(backend.vocabulary.tokens.index(b"["))
    assert [matcher.accept(space) for _ in range(9)] == [True] * 8 + [False]
    spec = GrammarSpec("json_schema", '{"type":"array"}', whitespace="\n")
    matcher = backend.compile(spec).matcher()
    assert matcher.accept(backend.vocabulary.tokens.index(b"["))
    assert not matcher.accept(space)
    assert matcher.accept(newline)
