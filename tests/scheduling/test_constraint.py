"""The state of a constraint against its meaning."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

from quire.foundation.errors import InputError
from quire.foundation.marker import Marker
from quire.scheduling.constraint import ConstraintState, Phase
from quire.scheduling.masks import make_masks
from quire.scheduling.request import Request
from quire.types.structured import Constraint, Thinking
from tests.scheduling.simulator import make_request
from tests.scheduling.toy_grammar import (
    EOS,
    VOCAB,
    ToyGrammar,
    ToyMatcher,
    ToySource,
    meaning,
    random_constraint,
    spec,
    tokens_of,
)


def begin(constraint: Constraint, stops: frozenset[int] = frozenset()) -> ConstraintState:
    grammar = constraint.grammar
    make = None if grammar is None else partial(ToyMatcher, ToyGrammar(int(grammar.text)))
    return ConstraintState(constraint, make, VOCAB, stops)


def allowed(state: ConstraintState) -> set[int] | None:
    """None: nothing is forbidden."""
    if not state.may_bind(0):
        return None
    request = Request(make_request("a", [1], 50), (0, 0), 50)
    request.constraint = state
    masks = make_masks(0, [(0, request)], VOCAB, ToySource())
    return tokens_of(masks.bits[0])


def test_any_answer_is_bound_as_it_should_be() -> None:
    """And whether something may be forbidden some tokens later is never denied wrongly."""
    for seed in range(1500):
        rng = random.Random(seed)
        constraint, stops = random_constraint(rng), frozenset(rng.choice(((), (4,), (2, 4))))
        state = begin(constraint, stops)
        output: list[int] = []
        said: list[list[bool]] = []  # a line a place: whether something may be forbidden 0, 1, 2, 3 tokens later
        while len(output) < 24:
            wanted, is_over, outlives_stop = meaning(constraint, output, stops)
            assert allowed(state) == wanted, seed
            assert state.is_done == is_over, seed
            assert state.outlives_stop == outlives_stop, seed
            if is_over:
                break
            said.append([state.may_bind(ahead) for ahead in range(4)])
            assert all(line[-1 - i] or wanted is None for i, line in enumerate(said[-4:])), seed
            token = rng.choice(sorted(wanted)) if wanted is not None else rng.randint(1, 4)
            output.append(token)
            assert state.advance(token) == meaning(constraint, output, stops).is_over, seed


def test_a_refused_token_changes_nothing_but_the_verdict() -> None:
    state = begin(Constraint(spec(5)))
    wrong = next(token for token in range(VOCAB) if token not in ToyGrammar(5).allows([]))
    assert state.advance(wrong)
    assert state.is_refused
    assert not state.is_done


def test_a_spent_thinking_goes_on_from_the_part_of_the_marker_that_is_there() -> None:
    state = begin(Constraint(None, Thinking(end=[7, 8, 9], max_tokens=3)))
    for token in (1, 7, 8):
        assert not state.advance(token)
    assert allowed(state) == {9}
    state.advance(9)
    assert state.phase is Phase.FREE


def test_a_stop_token_ends_the_thinking_only_while_a_grammar_waits() -> None:
    for grammar, goes_on in ((spec(5), True), (None, False)):
        state = begin(Constraint(grammar, Thinking(end=[7, 8])), frozenset([4]))
        for token in (1, 7, 4):
            assert not state.advance(token)
        assert state.outlives_stop == goes_on
        assert allowed(state) == ({7} if goes_on else None)


def test_a_thinking_that_may_come_leaves_the_choice_to_the_model() -> None:
    thinking = Thinking(end=[20], start=[21], state="maybe")
    grammar = ToyGrammar(4)
    for first, phase in ((21, Phase.THINKING), (min(grammar.allows([]) - {EOS}), Phase.GRAMMAR)):
        state = begin(Constraint(spec(4), thinking))
        assert allowed(state) == grammar.allows([]) | {21}
        state.advance(first)
        assert state.phase is phase


@pytest.mark.parametrize(
    ("thinking", "words"),
    [
        (Thinking(end=[]), "at least 1 token"),
        (Thinking(end=[VOCAB]), r"tokens in \[0, 23\)"),
        (Thinking(end=[1], start=[-1]), r"tokens in \[0, 23\)"),
        (Thinking(end=[1], max_tokens=-1), ">= 0"),
        (Thinking(end=[1, 2], end_seam=2), "seam"),
    ],
)
def test_markers_that_cannot_be(thinking: Thinking, words: str) -> None:
    with pytest.raises(InputError, match=words):
        begin(Constraint(None, thinking))


def test_a_header_may_say_more_before_it_ends_and_the_grammar_binds_behind_it() -> None:
    channel, final, message, constrain, json_ = 18, 19, 20, 5, 6
    thinking = Thinking(end=[channel, final, message], end_seam=2, max_tokens=9)
    for header in ([channel, final, message], [channel, final, constrain, json_, message]):
        state = begin(Constraint(spec(5), thinking))
        for token in (1, 2, channel, 7, message, *header):  # another channel first, which ends nothing
            assert state.phase is Phase.THINKING
            state.advance(token)
        assert state.phase is Phase.GRAMMAR
    state = begin(Constraint(spec(5), thinking))
    for token in (1, 1, 1, 1, 1, channel, final, constrain, json_):
        state.advance(token)
    assert allowed(state) == {message}, "the budget ends inside the header"


def test_a_marker_with_a_seam_is_found_wherever_it_comes() -> None:
    """Two markers, the second behind the first."""
    rng = random.Random(4)
    for _ in range(500):
        head, tail = [0, rng.randint(1, 3)], [4, *(rng.randint(1, 3) for _ in range(rng.randint(0, 1)))]
        stream = [rng.randint(0, 4) for _ in range(60)]
        marker, matched, found = Marker(head + tail, 2), 0, None
        for place, token in enumerate(stream, 1):
            matched = marker.follow(matched, token)
            if matched == len(marker.tokens):
                found = place
                break
        naive, begun = None, False
        for place in range(1, 61):
            begun = (begun and stream[place - 1] != 0) or stream[max(0, place - 2) : place] == head
            if begun and stream[place - len(tail) : place] == tail:
                naive = place
                break
        assert found == naive, (head, tail, stream)


def test_a_marker_is_found_wherever_it_comes() -> None:
    rng = random.Random(3)
    for _ in range(500):
        end = [rng.randint(0, 1) for _ in range(rng.randint(1, 5))]
        stream = [rng.randint(0, 1) for _ in range(30)]
        marker, matched, found = Marker(end), 0, None
        for place, token in enumerate(stream, 1):
            matched = marker.follow(matched, token)
            if matched == len(end):
                found = place
                break
        naive = (place for place in range(len(end), 31) if stream[place - len(end) : place] == end)
        assert found == next(naive, None)


def test_masks_name_the_bound_rows_alone() -> None:
    def request(name: str, constraint: Constraint) -> Request:
        made = Request(make_request(name, [1], 50), (0, 0), 50)
        made.constraint = begin(constraint)
        return made

    rows = [
        (0, request("grammar", Constraint(spec(3)))),
        (2, request("thinking", Constraint(spec(3), Thinking(end=[5])))),
        (3, request("spent", Constraint(spec(3), Thinking(end=[5], max_tokens=0)))),
        (7, request("closing", Constraint(spec(8), close_at_limit=True))),
    ]
    source = ToySource()
    masks = make_masks(9, rows, VOCAB, source)
    assert (masks.step, masks.rows.tolist(), masks.bits.dtype, masks.bits.shape) == (9, [0, 3, 7], np.int32, (3, 1))
    assert [tokens_of(row) for row in masks.bits] == [ToyGrammar(3).allows([]), {5}, ToyGrammar(8).allows([])]
    assert source.closed == [49]  # tokens that are left, the next included
