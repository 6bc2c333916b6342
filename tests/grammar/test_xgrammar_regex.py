"""Regular expressions as xgrammar is given them mean what they mean to Python, by themselves and in schemas."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from quire.foundation.errors import InputError
from quire.grammar.xgrammar.regex import rewritten
from quire.types.structured import GrammarSpec
from tests.grammar.walk import demo, takes

TEXTS = ["".join(text) for length in range(5) for text in itertools.product("abc", repeat=length)]
COUNTS = ["?", "*", "+", "{1,2}", "{2}", "{0,1}", "{1,}", "{2,3}", "{0,2}"]
KNOWN = ["(ca+)?b", "(ca{1,2})?b", "a(c[ab]{1,3})?b", "((a{2,3})?){1,}", "(a|bc)+", "^a|b$", "[^b]c?"]


def made_up(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(8) if depth else 0
    if kind < 2:
        return rng.choice(["a", "b", "[ab]", "c", "."])
    if kind < 4:
        return made_up(rng, depth - 1) + made_up(rng, depth - 1)
    if kind == 4:
        return f"({made_up(rng, depth - 1)}|{made_up(rng, depth - 1)})"
    return f"({made_up(rng, depth - 1)}){rng.choice(COUNTS)}"


@pytest.mark.parametrize("seed", range(4))
def test_expressions_mean_what_they_mean_to_python(seed: int) -> None:
    rng, backend, num_taken = random.Random(seed), demo("xgrammar"), 0
    for pattern in [*KNOWN, *(made_up(rng, 3) for _ in range(20))]:
        whole = f"^({pattern})$" if pattern not in KNOWN else pattern
        alone = backend.compile(GrammarSpec("regex", pattern))
        try:
            within = backend.compile(GrammarSpec("json_schema", json.dumps({"type": "string", "pattern": whole})))
        except InputError:
            within = None
        for text in rng.sample(TEXTS, 40):
            assert takes(backend, alone.matcher(), text) == bool(re.fullmatch(pattern, text)), (pattern, text)
            if within is not None:
                assert takes(backend, within.matcher(), f'"{text}"') == bool(re.search(whole, text)), (pattern, text)
        num_taken += within is not None
    assert num_taken > 15


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(?=a)b", "look-around"),
        (r"(a)\1", "back-references"),
        ("a$b", "an anchor within"),
        (r"\bword", "an anchor within"),
        ("(?i:a)", "flags"),
        ("a{,3}", "flags or"),
        ("a|b{1,2}", "repeat of several lengths"),
        ('"', "which JSON escapes"),
        ("(", "cannot be read"),
    ],
)
def test_what_it_would_read_otherwise_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        rewritten(pattern, "the pattern", within_json=True)
    assert says in error.value.message
