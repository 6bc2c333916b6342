"""Prompts leave readers their pace: what is learned from steps, and what the scheduler makes of it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.scheduling.prefill_budget import LEAST, LEAST_STEPS, LONGEST, MIN_TOKENS, SHORT, PrefillBudget
from quire.scheduling.scheduler import Scheduler
from quire.types.kv import PromptCost
from quire.types.result import StepResult
from quire.types.sampling import RequestOutputKind
from tests.scheduling.simulator import groups, make_request

DECODE, TOKEN = 0.005, 25e-6  # seconds of a decode step and of a prompt token


def taught(decode: float = DECODE, token: float = TOKEN) -> PrefillBudget:
    prefill_budget = PrefillBudget()
    rng = random.Random(0)
    for _ in range(20):
        prefill_budget.observe(0, decode)
        count = rng.randint(1, 4000)
        prefill_budget.observe(count, decode + token * count)
    return prefill_budget


def test_it_learns_what_a_decode_step_and_a_prompt_token_cost() -> None:
    prefill_budget = taught()
    assert prefill_budget.predict(0) == pytest.approx(DECODE)
    assert prefill_budget.predict(1000) == pytest.approx(DECODE + 1000 * TOKEN)


def test_nothing_is_bounded_before_anything_is_known() -> None:
    prefill_budget = PrefillBudget()
    prefill_budget.observe(0, DECODE)
    assert prefill_budget.allowance(0.0, 1) is None


def test_one_step_that_something_delayed_is_forgotten() -> None:
    prefill_budget = taught()
    usual = prefill_budget.allowance(10.0, 1)
    prefill_budget.observe(8000, 5.0)
    slow = prefill_budget.allowance(10.0, 1)
    for _ in range(32):
        prefill_budget.observe(200, DECODE + 200 * TOKEN)
    assert usual is not None
    assert slow is not None
    assert slow < usual / 4
    assert prefill_budget.allowance(10.0, 1) == pytest.approx(usual, rel=1e-3)
    assert prefill_budget.token_seconds == pytest.approx(TOKEN)
    prefill_budget.observe(0, 1.0)  # a decode step too
    assert prefill_budget.decode_seconds == DECODE


@given(
    decode=st.floats(1e-4, 1.0),
    token=st.floats(1e-7, 1e-2),
    waits=st.lists(st.floats(0, 1e4), min_size=2, max_size=2).map(sorted),
)
def test_a_step_keeps_its_time_and_prompts_that_wait_get_more(decode: float, token: float, waits: list[float]) -> None:
    prefill_budget = taught(decode, token)
    less, more = (prefill_budget.allowance(waited, 1) for waited in waits)
    assert less is not None
    assert more is not None
    assert MIN_TOKENS <= less <= more
    if more > MIN_TOKENS:
        assert decode + more * token <= max(LONGEST, decode + max(LEAST, LEAST_STEPS * decode)) * (1 + 1e-6)
    assert less * token >= (LEAST - token) * (1 - 1e-6)  # prompts go on, however slow a decode step is


def test_steps_that_are_padded_anyway_are_filled_up() -> None:
    prefill_budget = PrefillBudget([(0, 256), (16, 256), (16, 384), (16, 512), (64, 128), (64, 256)])
    prefill_budget.observe(0, DECODE)
    prefill_budget.observe(1000, DECODE + 1000 * TOKEN)  # LEAST_STEPS x DECODE is worth 300 tokens
    assert prefill_budget.allowance(0.0, 3) == 384 - 16
    assert prefill_budget.allowance(0.0, 16) == 384 - 16
    assert prefill_budget.allowance(0.0, 17) == 300  # more than steps with so many rows hold
    assert prefill_budget.allowance(0.0, 65) == 300
    assert prefill_budget.allowance(10.0, 3) == 3800
    prefill_budget = PrefillBudget([(64, 128), (64, 256), (64, 512)])
    prefill_budget.observe(0, DECODE)
    prefill_budget.observe(1000, DECODE + 1000 * TOKEN)
    assert prefill_budget.allowance(0.0, 17) == 512 - 64


class Clocked:
    """A scheduler whose steps take DECODE + TOKEN a prompt token of a clock of our own.

    seen: seconds that a prompt token takes for each that it attends to; wave: it takes as long for fewer tokens.
    """

    def __init__(self, max_model_len: int = 16384, seen: float = 0.0, wave: int = 0, cost: float = 0.0) -> None:
        self.now = 100.0
        self.number = 0
        self.seen, self.wave = seen, wave or 1
        self.scheduler = Scheduler(
            max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=max_model_len, num_blocks=max_model_len // 4,
            groups=groups(16), prompt_cost=PromptCost(cost, wave), clock=lambda: self.now,
        )  # fmt: skip
        self.context: dict[int, int] = {}  # tokens by seat

    def add(self, length: int, max_tokens: int, kind: RequestOutputKind = RequestOutputKind.DELTA) -> None:
        self.number += 1
        prompt = [self.number * 100_000 + i for i in range(length)]
        self.scheduler.add(make_request(f"r{self.number}", prompt, max_tokens, stops=(), output_kind=kind))

    def step(self) -> tuple[int, float]:
        """(prompt tokens, seconds) of the next step."""
        plan = self.scheduler.plan()
        assert plan is not None
        count = int(plan.num_tokens.sum()) - plan.num_decodes
        seconds = DECODE + TOKEN * count
        self.context |= {admit.seat: admit.num_computed for admit in plan.admits}
        for row, (seat, tokens) in enumerate(zip(plan.seats.tolist(), plan.num_tokens.tolist(), strict=True)):
            if row >= plan.num_decodes:
                attending = -(-tokens // self.wave) * self.wave
                seconds += self.seen * attending * (self.context[seat] + tokens / 2)
            self.context[seat] += tokens
        self.now += seconds
        self.scheduler.prefill_budget.observe(self.scheduler.planned_work, seconds)
        sampled = np.where(plan.samples, 7, -1).astype(np.int32)
        self.scheduler.settle(plan, StepResult(step=plan.step, tokens=sampled[:, None], counts=sampled))
        return count, seconds


def test_readers_wait_no_longer_than_the_longest_step() -> None:
    clocked = Clocked()
    clocked.add(100, 2000)
    assert clocked.step()[0] == 100  # nobody reads yet: in one go
    clocked.step()
    for _ in range(20):
        clocked.add(2000, 4)
    steps = []
    while clocked.scheduler.stats().num_running > 1 or clocked.scheduler.stats().num_waiting:
        steps.append(clocked.step())
    longest = max(seconds for _, seconds in steps)
    assert longest <= LONGEST + 1e-6
    assert longest > LONGEST * 0.9  # prompts that have waited long get long steps …
    assert steps[0][1] < LONGEST / 4  # … those that have just come do not
    assert sum(count for count, _ in steps) == 40_000


@pytest.mark.parametrize(("wave", "wrong"), [(0, 1.0), (0, 0.6), (512, 1.0), (512, 1.5), (512, 0.7)])
def test_a_long_prompt_leaves_readers_their_pace_however_far_it_is(wave: int, wrong: float) -> None:
    """131,072 tokens beside 32 readers, where a token costs five times as much at the end as at the beginning; wrong:
    that, in what the scheduler was told."""
    ratio = 3.2e-5
    clocked = Clocked(131_072 + 64, seen=ratio * TOKEN, wave=wave, cost=ratio * wrong)
    for _ in range(32):
        clocked.add(100, 4000)
    for _ in range(20):
        clocked.step()
    began = clocked.now
    clocked.add(131_072, 4)
    steps = [clocked.step()]
    while clocked.scheduler.stats().prompt_tokens < 131_072 + 32 * 100:
        steps.append(clocked.step())
    took = clocked.now - began
    assert max(seconds for _, seconds in steps) < 0.09
    alone = 131_072 * TOKEN * (1 + ratio * 131_072 / 2)
    assert took < 1.2 * alone
    assert steps[0][1] < LONGEST / 4
    assert steps[-2][0] < 1024 < max(count for count, _ in steps)


def test_a_chunk_that_is_far_takes_a_whole_wave() -> None:
    prefill_budget = PrefillBudget(cost=PromptCost(attention=1e-4, wave=512))
    assert prefill_budget.work(512, 0) == 512
    assert prefill_budget.work(100, 100_000) == pytest.approx(100 + 512 * 1e-4 * (100_050 - SHORT))
    assert prefill_budget.tokens(3000, 0, is_first=True) == 3000
    assert prefill_budget.tokens(3000, 100_000, is_first=True) == 512  # what is less takes nearly as long
    assert prefill_budget.tokens(3000, 100_000, is_first=False) == 0  # but not at the end of somebody else's step
    one, two = prefill_budget.work(512, 100_000), prefill_budget.work(1024, 100_000)
    assert prefill_budget.tokens((one + two) / 2, 100_000, is_first=False) == 512
    assert (
        prefill_budget.tokens(two - 1, 100_000, is_first=True) == 512
    )  # a second wave for some tokens is not worth it
    assert prefill_budget.tokens(two, 100_000, is_first=True) == 1024
    assert PrefillBudget(cost=PromptCost(windows=[(4096, 1e-4)])).work(100, 100_000) == 100


def test_a_short_prompt_before_a_long_one_does_not_pay_for_it() -> None:
    """What a step has left behind a short prompt's end is counted in what it takes, not in tokens."""
    clocked = Clocked(131_072, seen=8e-10, wave=512, cost=3.2e-5)
    clocked.add(100, 4000)
    for _ in range(5):
        clocked.step()
    clocked.add(100_000, 1)
    while clocked.context.get(2, 0) < 90_000:
        clocked.step()
    clocked.add(50, 1)
    while clocked.scheduler.stats().num_running + clocked.scheduler.stats().num_waiting > 1:
        assert clocked.step()[1] < 0.09


def test_prompts_come_in_one_go_where_nobody_reads() -> None:
    clocked = Clocked()
    for _ in range(4):
        clocked.add(100, 50, RequestOutputKind.FINAL_ONLY)
    for _ in range(4):
        clocked.step()
    clocked.add(8000, 4, RequestOutputKind.FINAL_ONLY)
    assert clocked.step()[0] == 8000


def test_a_plan_can_be_late_only_if_it_brings_just_tokens_that_are_read() -> None:
    clocked = Clocked()
    assert not clocked.scheduler.can_be_late
    clocked.add(100, 50)
    assert not clocked.scheduler.can_be_late  # a prompt waits
    clocked.step()
    assert clocked.scheduler.can_be_late
    clocked.add(9000, 4)
    assert not clocked.scheduler.can_be_late
    clocked.step()
    assert not clocked.scheduler.can_be_late  # it is not through yet
    quiet = Clocked()
    quiet.add(100, 50, RequestOutputKind.FINAL_ONLY)
    quiet.step()
    assert not quiet.scheduler.can_be_late
