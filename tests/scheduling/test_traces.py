"""Random lives of a scheduler against the simulator: the same tokens as alone, and nothing left behind.

Every run takes others; `random_life(seed)` repeats one that failed. QUIRE_TRACES sets their number.
"""

from __future__ import annotations

import os
import random
import traceback
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scheduling.simulator import make_request
from tests.scheduling.traces import Life, World, random_life

NUM_TRACES = int(os.environ.get("QUIRE_TRACES", "5000"))
PARTS = 8  # that several processes can share


@pytest.mark.parametrize("part", range(PARTS))
def test_random_traces(part: int) -> None:
    failures, preemptions, shared = [], 0, 0
    first = random.SystemRandom().randrange(2**40)
    seeds = range(first + part, first + NUM_TRACES, PARTS)
    for seed in seeds:
        try:
            life = random_life(seed)
        except Exception:
            failures.append(f"random_life({seed})\n{traceback.format_exc(limit=-3)}")
        else:
            preemptions += life.scheduler.stats().num_preemptions
            shared += life.device.num_shared_rows
    assert not failures, f"{len(failures)} of {len(seeds)} traces failed, the first:\n{failures[0]}"
    assert preemptions > len(seeds) / 10, "these traces hardly ever preempt: too easy"
    assert shared > len(seeds) / 4, "these traces hardly ever share a prefix: too easy"


@pytest.mark.parametrize("part", range(PARTS))
def test_random_traces_with_drafts(part: int) -> None:
    """However many of the drafts turn out right, which only the device knows while the next step is planned."""
    failures, drafted, accepted, preemptions = [], 0, 0, 0
    first = random.SystemRandom().randrange(2**40)
    seeds = range(first + part, first + NUM_TRACES // 4, PARTS)
    for seed in seeds:
        try:
            life = random_life(seed, drafts=True)
        except Exception:
            failures.append(f"random_life({seed}, drafts=True)\n{traceback.format_exc(limit=-3)}")
        else:
            drafted += life.device.num_drafted_rows
            accepted += life.device.num_accepted
            preemptions += life.scheduler.stats().num_preemptions
    assert not failures, f"{len(failures)} of {len(seeds)} traces failed, the first:\n{failures[0]}"
    assert drafted > accepted > len(seeds) / 4, "these traces hardly ever draft: too easy"
    assert preemptions > len(seeds) / 10, "these traces hardly ever preempt: too easy"


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


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
