"""What settling a step tells."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.foundation.errors import QuireError
from quire.types.sampling import RequestOutputKind
from tests.scheduling.simulator import EOS
from tests.scheduling.test_plans import add, begin, prompt

LONG = 40  # long enough an answer that the stops below occur in it


def answer_of(name: str = "a") -> list[int]:
    life = begin()
    add(life, name, prompt(6), LONG)
    return life.references[name].output


def test_every_token_is_told_in_the_step_that_is_settled() -> None:
    life = begin(depth=1)
    add(life, "a", prompt(6), 4)
    life.run()
    told = life.told["a"]
    assert [output.token_ids for output in told] == [[token] for token in life.references["a"].output]
    assert [output.finish_reason for output in told] == [None, None, None, "length"]


def test_the_first_output_says_how_long_it_waited() -> None:
    life = begin(depth=1)
    add(life, "a", prompt(6), 4, arrival=time.time() - 5)
    add(life, "b", prompt(6), 4)
    life.run()
    first, *later = life.told["a"]
    assert 5 <= first.queued < 60
    assert {output.queued for output in later} == {0.0}
    assert life.told["b"][0].queued == 0.0  # arrival unknown


def test_stops_are_part_of_the_answer_and_named_unless_they_are_the_end_token() -> None:
    tokens = answer_of()
    end = tokens.index(EOS)
    stop = next(token for token in tokens if token != EOS)
    for stops, length, reason in (((EOS,), end + 1, None), ((stop,), tokens.index(stop) + 1, stop)):
        life = begin()
        add(life, "a", prompt(6), LONG, stops=stops)
        life.run()
        last = life.told["a"][-1]
        assert (len(life.output("a")), last.finish_reason, last.stop_reason) == (length, "stop", reason)


def test_stops_do_not_count_before_min_tokens() -> None:
    tokens = answer_of()
    stop = next(token for token in tokens if token in tokens[tokens.index(token) + 1 :])
    first = tokens.index(stop)
    second = tokens.index(stop, first + 1)
    for min_tokens, length in ((first + 1, first + 1), (first + 2, second + 1)):
        life = begin()
        add(life, "a", prompt(6), LONG, stops=(stop,), min_tokens=min_tokens)
        life.run()
        assert len(life.output("a")) == length


def test_a_neighbours_stop_token_stops_nobody_else() -> None:
    life = begin()
    add(life, "a", prompt(6), 12, stops=tuple(range(23)))
    add(life, "b", prompt(6), 12)
    life.run()
    assert (len(life.output("a")), len(life.output("b"))) == (1, 12)


def test_logprobs_come_with_their_token() -> None:
    life = begin()
    add(life, "a", prompt(6), 4, logprobs=0)
    add(life, "b", prompt(6), 4)
    life.run()
    for output in life.told["a"]:
        assert output.logprobs is not None
        (line,) = output.logprobs
        assert (line.token_ids, line.logprobs, line.rank) == (output.token_ids, [-float(output.token_ids[0])], 1)
    assert all(output.logprobs is None for output in life.told["b"])


@pytest.mark.parametrize("world", [{}, {"max_prefill_chunk": 3}, {"num_blocks": 9, "preempt_every_step": True}])
def test_prompt_logprobs_are_collected_over_chunks_and_come_first(world: dict[str, Any]) -> None:
    life = begin(**world)
    add(life, "warm", prompt(11), 2)
    life.run()
    add(life, "a", prompt(11), 4, prompt_logprobs=0)
    life.run()
    first, *later = life.told["a"]
    assert first.prompt_logprobs is not None
    assert [line.token_ids for line in first.prompt_logprobs] == [[token] for token in prompt(11)[1:]]
    assert first.num_cached_tokens == 0
    assert all(output.prompt_logprobs is None for output in later)


def test_who_reads_only_the_end_is_told_the_first_token_and_then_the_rest_at_once() -> None:
    life = begin()
    add(life, "a", prompt(6), 5, output_kind=RequestOutputKind.FINAL_ONLY)
    add(life, "b", prompt(6), 5)
    life.run()
    assert [len(output.token_ids) for output in life.told["a"]] == [1, 4]
    assert [len(output.token_ids) for output in life.told["b"]] == [1, 1, 1, 1, 1]
    assert life.output("a") == life.output("b")


def test_who_has_stop_strings_or_logprobs_is_told_every_token() -> None:
    life = begin()
    add(life, "a", prompt(6), 5, output_kind=RequestOutputKind.FINAL_ONLY, stop=["x"])
    add(life, "b", prompt(6), 5, output_kind=RequestOutputKind.FINAL_ONLY, logprobs=0)
    life.run()
    assert [len(life.told[name]) for name in "ab"] == [5, 5]


def test_statistics() -> None:
    life = begin(depth=1)
    add(life, "a", prompt(6), 5)
    add(life, "b", prompt(30, 200), 5)
    life.turn()
    stats = life.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_seats_used) == (2, 0, 2)
    assert (stats.num_blocks, stats.num_free_blocks) == (16, 12)
    assert stats.kv_usage == 4 / 16
    assert (stats.prompt_tokens, stats.generation_tokens) == (6, 1)
    life.run()
    stats = life.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_running) == (36, 10, 0)


def test_a_failed_step_is_not_settled_and_its_requests_are_known() -> None:
    life = begin(max_num_seqs=2)
    for name in "abcd":
        add(life, name, prompt(6), 5)
    life.plan()
    life.plan()
    assert life.scheduler.ids_in(1) == life.scheduler.ids_in(2) == ["a", "b"]
    plan, result = life.in_flight[0]
    with pytest.raises(QuireError, match="nothing to settle: out of memory"):
        life.scheduler.settle(plan, msgspec.structs.replace(result, error="out of memory"))


def test_results_must_come_in_order_and_be_possible() -> None:
    life = begin()
    add(life, "a", prompt(6), 5)
    life.plan()
    life.plan()
    (first, result), (second, late) = life.in_flight
    with pytest.raises(QuireError, match="result of step 1 came for plan 1; expected: 0"):
        life.scheduler.settle(second, late)
    for tokens in ([[-1]], [[1], [2]]):
        with pytest.raises(QuireError, match="step 0: the result lacks a token"):
            life.scheduler.settle(first, msgspec.structs.replace(result, tokens=np.array(tokens, np.int32)))
    life.run()  # the refused results have changed nothing
    with pytest.raises(QuireError, match="expected: none"):
        life.scheduler.settle(first, result)
