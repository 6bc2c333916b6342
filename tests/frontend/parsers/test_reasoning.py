"""Reasoning formats: what is reasoning and what is content does not depend on how the text comes."""

from __future__ import annotations

import random

import pytest

from quire.frontend.parsers.base import REASONING_FORMATS
from quire.frontend.parsers.formats import Formats
from quire.frontend.replies import Reply, ReplyPlan, ReplyWish
from tests.frontend.parsers.answers import WRITERS, Written, cuts

ANSWERS, CUTS = 60, 12  # of each format; `python -m benchmarks.parsers reasoning` does all cuts of many more


def plan_of(name: str, written: Written) -> ReplyPlan:
    formats = Formats(reasoning=REASONING_FORMATS.get(name))
    return ReplyPlan(formats, ReplyWish(), written.prompt, written.kwargs)


def parsed(plan: ReplyPlan, portions: object) -> Reply:
    parser, reply = plan.parser(), Reply()
    for portion in portions:  # type: ignore[attr-defined]
        reply.add(parser.feed(portion))
    return reply.add(parser.finish())


@pytest.mark.parametrize("name", WRITERS)
def test_split_as_written_however_it_is_cut(name: str) -> None:
    rng = random.Random(name)
    for _ in range(ANSWERS):
        written = WRITERS[name](rng)
        plan = plan_of(name, written)
        expected = Reply(written.reasoning, written.content)
        assert parsed(plan, [written.text]) == expected, written
        for portions in cuts(written.text, rng, CUTS):
            assert parsed(plan, portions) == expected, (written, portions)


def test_all_names_are_tested_and_load() -> None:
    assert set(REASONING_FORMATS) == set(WRITERS)
    assert len(WRITERS) == 28
    for name in REASONING_FORMATS:
        REASONING_FORMATS.get(name)
