"""Random lives of a scheduler against the simulator: the same tokens as alone, and nothing left behind.

Every run takes others; `random_life(seed)` repeats one that failed. QUIRE_TRACES sets their number.
`random_life(seed, mixed=True)` lives with several groups of layers, which keep different things.
"""

from __future__ import annotations

import os
import random
import traceback
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.scheduling import request
from tests.effort import some
from tests.scheduling.simulator import make_request
from tests.scheduling.traces import Life, World, random_life

NUM_TRACES = int(os.environ.get("QUIRE_TRACES", "5000"))
NUM_LONG = 100_000
PARTS = 8  # that several processes can share


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mixed", [False, True])
def test_random_traces(part: int, mixed: bool) -> None:
    live_through(NUM_TRACES // 2, part, mixed)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_many_traces_of_mixed_groups(part: int) -> None:
    live_through(NUM_LONG, part, mixed=True)


def live_through(count: int, part: int, mixed: bool) -> None:
    """One of PARTS equal parts of so many traces."""
    failures: list[str] = []
    seen: Counter[str] = Counter()
    first = random.SystemRandom().randrange(2**40)
    seeds = range(first + part, first + count, PARTS)
    for seed in seeds:
        try:
            life = random_life(seed, mixed=mixed)
        except Exception:
            failures.append(f"random_life({seed}, {mixed=})\n{traceback.format_exc(limit=-3)}")
        else:
            stats = life.scheduler.stats()
            seen.update(preemptions=stats.num_preemptions, cached=stats.cached_tokens)
            seen.update(shared=life.device.num_shared_rows)
    assert not failures, f"{len(failures)} of {len(seeds)} traces failed, the first:\n{failures[0]}"
    assert seen["preemptions"] > len(seeds) / 10, "these traces hardly ever preempt: too easy"
    assert seen["shared"] > len(seeds) / (100 if mixed else 10), "these traces hardly ever share a prefix: too easy"
    assert seen["cached"] > len(seeds), "these traces hardly ever find anything in the cache: too easy"


def test_what_an_engine_was_told_of_goes_on_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties, stops, lengths, constraints and repeated tokens are as if nobody had died."""
    monkeypatch.setattr(request, "REPORT_TOKENS", 3)
    first, deaths, resumed = random.SystemRandom().randrange(2**40), 0, 0
    for seed in range(first, first + NUM_TRACES // 10):
        try:
            life = random_life(seed, deaths=0.04)
        except Exception as error:
            raise AssertionError(f"random_life({seed}, deaths=0.04)") from error
        deaths += life.num_deaths
        resumed += sum(len(told) > 1 for told in life.told.values()) if life.num_deaths else 0
    assert deaths > NUM_TRACES / 20, "hardly any engine died: too easy"
    assert resumed > NUM_TRACES / 20


@pytest.mark.parametrize("options", [{}, {"mixed": True}, {"mixed": True, "deaths": 0.01}], ids=str)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_traces_with_drafts(part: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of the drafts turn out right, which only the device knows while the next step is planned."""
    monkeypatch.setattr(request, "REPORT_TOKENS", 3)
    failures, drafted, accepted, preemptions = [], 0, 0, 0
    first = random.SystemRandom().randrange(2**40)
    seeds = range(first + part, first + NUM_TRACES // 8, PARTS)
    for seed in seeds:
        try:
            life = random_life(seed, drafts=True, **options)
        except Exception:
            failures.append(f"random_life({seed}, drafts=True, **{options})\n{traceback.format_exc(limit=-3)}")
        else:
            drafted += life.device.num_drafted_rows
            accepted += life.device.num_accepted
            preemptions += life.scheduler.stats().num_preemptions
    assert not failures, f"{len(failures)} of {len(seeds)} traces failed, the first:\n{failures[0]}"
    assert drafted > accepted > len(seeds) / 4, "these traces hardly ever draft: too easy"
    assert preemptions > len(seeds) / 10, "these traces hardly ever preempt: too easy"


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("part", range(PARTS))
def test_random_traces_with_states(part: int, mixed: bool) -> None:
    """Each goes on from its own state, or from a copy of one that had the very same tokens."""
    failures, preemptions, hits, copies = [], 0, 0, 0
    first = random.SystemRandom().randrange(2**40)
    seeds = range(first + part, first + NUM_TRACES // 4, PARTS)
    for seed in seeds:
        try:
            life = random_life(seed, states=True, mixed=mixed, deaths=0.01)
        except Exception:
            failures.append(f"random_life({seed}, states=True, {mixed=})\n{traceback.format_exc(limit=-3)}")
        else:
            preemptions += life.scheduler.stats().num_preemptions
            hits += life.scheduler.stats().cached_tokens > 0
            copies += life.device.num_copies
            assert life.world.enable_prefix_caching or not life.device.num_copies
    assert not failures, f"{len(failures)} of {len(seeds)} traces failed, the first:\n{failures[0]}"
    assert preemptions > len(seeds) / 10, "these traces hardly ever preempt: too easy"
    assert copies > hits > len(seeds) / 50, "these traces hardly ever find a state: too easy"


adds = st.tuples(
    st.just("add"),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(-1, 1),
    st.sampled_from([(), (0,), (0, 3, 5)]),
)
others = st.tuples(st.sampled_from(["plan", "plan", "turn", "turn", "abort", "reset"]), st.integers(0, 5))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    seqs = draw(st.integers(1, 4))
    return World(
        block_size=draw(st.sampled_from([1, 2, 4])),
        num_blocks=draw(st.integers(3, 14)),
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + draw(st.integers(0, 10)),
        max_prefill_chunk=draw(st.sampled_from([0, 1, 3])),
        max_model_len=draw(st.sampled_from([12, 24])),
        depth=draw(st.integers(1, 3)),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        preempt_every_step=draw(st.booleans()),
        enable_prefix_caching=draw(st.booleans()),
    )


@settings(max_examples=some(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds(), st.lists(st.one_of(adds, others), max_size=25))
def test_any_trace(world: World, acts: list[tuple[Any, ...]]) -> None:
    """The same with a tool that shrinks what fails to the shortest story."""
    life = Life(world)
    for act in acts:
        match act:
            case ("add", ids, max_tokens, priority, stops):
                number = len(life.references)
                spec = make_request(
                    f"r{number}", ids[: life.max_len - 1], max_tokens, number=number, stops=stops, priority=priority
                )
                life.add(spec)
            case ("plan", _) if len(life.in_flight) < world.depth:
                life.plan_if_any()
            case ("abort", index):
                if life.open:
                    life.abort(list(life.open)[index % len(life.open)])
            case ("reset", index):
                assert life.scheduler.reset_prefix_cache(bool(index % 2))
            case _:
                life.turn()
        life.scheduler.check()
    life.run()
    life.check_empty()


@pytest.mark.parametrize("options", [{}, {"mixed": True}, {"drafts": True}, {"deaths": 0.02}], ids=str)
def test_random_traces_with_adapters(options: dict[str, Any]) -> None:
    """More adapters than slots: every row finds its own in its slot, and shares no prefix with another's."""
    first, passed = random.SystemRandom().randrange(2**40), 0
    for seed in range(first, first + NUM_TRACES // 20):
        try:
            life = random_life(seed, adapters=True, **options)
        except Exception as error:
            raise AssertionError(f"random_life({seed}, adapters=True, {options})") from error
        passed += sum(len(plan.adapters) for plan in life.plans) > life.world.adapter_slots
    assert passed > NUM_TRACES / 200, "hardly any adapter had to make room: too easy"
