"""The door under load, in virtual time: the real scheduler, its load as the core reports it, and the real door before a
model of what steps take."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from quire.engine.core import STATS_SECONDS
from quire.scheduling.scheduler import Scheduler
from quire.server.door import LONG_WAIT, Door
from quire.server.http.errors import ApiError
from quire.server.metrics import Metrics
from quire.server.processes.shared_counters import SharedCounters
from quire.types.output import EngineOutput
from quire.types.request import BACKGROUND
from quire.types.result import StepResult
from quire.types.sampling import RequestOutputKind
from tests.effort import sampled
from tests.scheduling.simulator import groups, make_request
from tests.server.echo_llm import make_info

IN_TIME = 5.0  # seconds to the first token of a good answer
MAX_WAIT = 30.0
TRANSIT = 0.003  # seconds from the door to the core


class Device(NamedTuple):
    """What steps take, in seconds, and what is asked of it."""

    seats: int
    decode: float
    row: float
    token: float
    prompt: int
    answer: int
    blocks: int = 4000


DEVICES = {
    "rows": Device(seats=16, decode=0.02, row=5e-4, token=3e-5, prompt=20, answer=16),
    "answers": Device(seats=16, decode=0.02, row=2e-5, token=3e-5, prompt=60, answer=40),
    "prompts": Device(seats=64, decode=0.02, row=2e-5, token=1e-4, prompt=400, answer=4),
    "blocks": Device(seats=64, decode=0.02, row=2e-5, token=3e-5, prompt=60, answer=40, blocks=120),
}


@dataclass
class Asked:
    at: float
    first: float | None = None
    is_done: bool = False
    wait: float = 0.0  # as predicted


@dataclass
class Seen:
    taken: dict[str, Asked] = field(default_factory=dict)
    refused: list[tuple[float, int]] = field(default_factory=list)  # (when, told seconds)

    def good(self, start: float, end: float) -> int:
        return sum(
            start <= asked.at < end and asked.first is not None and asked.first - asked.at <= IN_TIME
            for asked in self.taken.values()
        )


INFO = make_info(max_model_len=4096)


class Simulation:
    def __init__(self, device: Device, max_seconds: float = MAX_WAIT, policy: str = "fcfs") -> None:
        self.now = 0.0
        self.device = device
        self.scheduler = Scheduler(
            max_num_seqs=device.seats, max_num_batched_tokens=4096, max_model_len=4096, num_blocks=device.blocks,
            groups=groups(16), clock=lambda: self.now, policy=policy,
        )  # fmt: skip
        self.door = Door(max_seconds, Metrics("m", INFO, SharedCounters()), clock=lambda: self.now)
        self.seen = Seen()
        self.on_the_way: deque[tuple[float, str, int]] = deque()
        self.reported = 0.0
        self.number = 0

    def come(self, at: float, priority: int = 0, background: bool = False) -> None:
        """A request at the door; the time of which is not after that of the engine."""
        now, self.now = self.now, at
        try:
            if not background:
                self.door.enter(priority)
        except ApiError as refusal:
            self.seen.refused.append((at, refusal.retry_after or 0))
        else:
            self.number += 1
            name = f"r{self.number}"
            self.seen.taken[name] = Asked(at, wait=self.door.wait(priority))
            self.on_the_way.append((at + TRANSIT, name, BACKGROUND if background else priority))
            if not background:
                self.door.hand_over(1)
        self.now = now

    def step(self) -> None:
        """The engine's next; half a millisecond of sleep if there is nothing to do."""
        drained_at = self.now
        while self.on_the_way and self.on_the_way[0][0] <= self.now:
            _, name, priority = self.on_the_way.popleft()
            prompt = [(int(name[1:]) * 7919 + i) % 30_000 + 10 for i in range(self.device.prompt)]
            kind = RequestOutputKind.DELTA
            request = make_request(name, prompt, self.device.answer, stops=(), output_kind=kind, priority=priority)
            self.scheduler.add(request)
        if (plan := self.scheduler.plan()) is None:
            self.now += 5e-4
            if not self.scheduler.has_work:
                self.report(drained_at)
            return
        count = int(plan.num_tokens.sum()) - plan.num_decodes
        device = self.device
        seconds = device.decode + device.row * plan.num_decodes + device.token * count
        self.now += seconds
        self.scheduler.observe(count, count, seconds, seconds)
        sampled = np.where(plan.samples, 7, -1).astype(np.int32)
        news = self.scheduler.settle(plan, StepResult(step=plan.step, tokens=sampled[:, None], counts=sampled))
        for output in news.each():
            self.take(output)
        if self.now - self.reported >= STATS_SECONDS:
            self.report(drained_at)

    def take(self, output: EngineOutput) -> None:
        asked = self.seen.taken[output.request_id]
        asked.first = self.now if asked.first is None else asked.first
        asked.is_done = output.finish_reason is not None

    def report(self, drained_at: float) -> None:
        self.reported = self.now
        stats = self.scheduler.queue_stats()
        self.door.report(type(stats)(**{n: getattr(stats, n) for n in stats.__struct_fields__} | {"as_of": drained_at}))

    def run(self, rate: float, seconds: float, draw: random.Random, patience: float = 60.0) -> None:
        """Requests come at `rate` a second (Poisson); who has waited for `patience` seconds hangs up."""
        end, at = self.now + seconds, self.now + draw.expovariate(rate)
        waiting: deque[str] = deque()
        while self.now < end:
            while at <= self.now:
                self.come(at)
                at += draw.expovariate(rate)
                waiting.append(f"r{self.number}")
            self.step()
            while waiting and self.seen.taken[waiting[0]].at < self.now - patience:
                if self.seen.taken[name := waiting.popleft()].first is None:
                    self.scheduler.abort([name])

    def drain(self) -> None:
        while self.scheduler.has_work or self.on_the_way:
            self.step()
        self.report(self.now)


@cache
def capacity(device: Device) -> float:
    """Requests a second of an engine that never lacks one, without a door."""
    simulation = Simulation(device, max_seconds=0)
    for _ in range(device.seats * 8):
        simulation.come(0.0)
    simulation.drain()
    firsts = sorted(asked.first or 0.0 for asked in simulation.seen.taken.values())
    early, late = len(firsts) // 4, 3 * len(firsts) // 4  # neither the first seats nor the last answers
    return (late - early) / (firsts[late] - firsts[early])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return DEVICES[request.param]


OVERLOADS = list(itertools.product(DEVICES, [(1.4, 60.0), (5.0, 120.0)]))


@pytest.mark.parametrize(
    ("name", "load"), sampled(OVERLOADS, lambda case: (case[1][0] > 2) == (case[0] in ("rows", "blocks")))
)
def test_most_of_the_peak_is_answered_in_time(name: str, load: tuple[float, float]) -> None:
    device, (factor, seconds) = DEVICES[name], load
    peak, draw = capacity(device), random.Random(int(factor))
    simulation = Simulation(device)
    simulation.run(0.5 * peak, 10.0, draw)
    start = simulation.now
    simulation.run(factor * peak, seconds, draw, patience=60.0 if factor < 3 else 30.0)
    # Normal 5 s after the load has dropped: nobody is refused or late.
    end = simulation.now
    simulation.run(0.5 * peak, 15.0, draw)
    simulation.drain()
    assert simulation.seen.good(start, start + seconds) >= 0.85 * peak * seconds
    late = [a for a in simulation.seen.taken.values() if a.at >= end + IN_TIME and (a.first or 1e9) - a.at > 1.0]
    assert not late
    assert max(when for when, _ in simulation.seen.refused) < end + IN_TIME
    assert all(asked.is_done for asked in simulation.seen.taken.values())  # what was taken was answered


def test_nobody_is_refused_below_the_peak(device: Device) -> None:
    peak, draw = capacity(device), random.Random(3)
    simulation = Simulation(device)
    simulation.run(0.9 * peak, 60.0, draw)
    assert not simulation.seen.refused


def test_a_burst_is_taken(device: Device) -> None:
    """Ten seconds of work at once: it waits, and nobody is refused."""
    peak, draw = capacity(device), random.Random(4)
    simulation = Simulation(device)
    simulation.run(0.3 * peak, 10.0, draw)
    for _ in range(int(10 * peak)):
        simulation.come(simulation.now)
    simulation.run(0.3 * peak, 20.0, draw)
    assert not simulation.seen.refused


def test_a_burst_after_an_overload_and_a_pause_is_taken(device: Device) -> None:
    peak, draw = capacity(device), random.Random(4)
    simulation = Simulation(device)
    simulation.run(5 * peak, 20.0, draw)
    refused = len(simulation.seen.refused)
    assert refused
    simulation.drain()
    simulation.now += 60.0
    for _ in range(int(8 * peak)):
        simulation.come(simulation.now)
    assert len(simulation.seen.refused) == refused


def test_so_many_clients_as_ask_again_when_they_are_answered_are_no_overload(device: Device) -> None:
    """A queue of five seconds that stands, but does not grow."""
    peak, draw = capacity(device), random.Random(9)
    simulation = Simulation(device)
    for _ in range(device.seats + int(5 * peak)):
        simulation.come(0.0)
    answered, again = 0, list[float]()  # when clients ask again: they take a moment
    while simulation.now < 60.0:
        simulation.step()
        done = sum(asked.is_done for asked in simulation.seen.taken.values())
        again += [simulation.now + draw.random() / 5 for _ in range(done - answered)]
        answered = done
        for at in sorted(at for at in again if at <= simulation.now):
            simulation.come(at)
        again = [at for at in again if at > simulation.now]
    assert answered > 40 * peak
    assert not simulation.seen.refused


def test_predictions_come_true(device: Device) -> None:
    """Of a wait of some seconds, within a third; and what a refused one is told is that wait."""
    peak, draw = capacity(device), random.Random(5)
    simulation = Simulation(device)
    simulation.run(1.3 * peak, 30.0, draw)
    simulation.drain()
    settled = [a for a in simulation.seen.taken.values() if a.at > 10.0 and a.wait > 1.0 and a.first is not None]
    assert len(settled) > 5 * peak
    ratios = sorted((a.first - a.at) / a.wait for a in settled)  # type: ignore[operator]
    assert ratios[len(ratios) // 20] > 0.66
    assert ratios[-len(ratios) // 20] < 1.75  # who is preempted waits again
    told = [seconds for when, seconds in simulation.seen.refused if when > 10.0]
    assert min(told) >= 1
    assert max(told) <= 2 * LONG_WAIT + 2


def test_the_limit_holds_for_a_burst_without_end() -> None:
    simulation = Simulation(DEVICES["rows"], max_seconds=3.0)
    peak = capacity(simulation.device)
    simulation.run(0.5 * peak, 10.0, random.Random(6))
    for _ in range(int(20 * peak)):
        simulation.come(simulation.now)
    taken = sum(asked.at == simulation.now for asked in simulation.seen.taken.values())
    assert 2.0 * peak < taken < 8.0 * peak  # steps grow with the batch, and it has seen small ones
    assert simulation.seen.refused[0][1] in (4, 5)


def test_nobody_is_refused_for_what_waits_behind() -> None:
    """Batches wait behind all others, and by priority so do worse ones; neither makes a better one wait."""
    for policy, behind in (("fcfs", {"background": True}), ("priority", {"priority": 5})):
        simulation = Simulation(DEVICES["rows"], policy=policy)
        peak = capacity(simulation.device)
        simulation.run(0.9 * peak, 5.0, random.Random(7))
        for _ in range(int(25 * peak)):
            simulation.come(simulation.now, **behind)
        for _ in range(40):
            simulation.step()
        assert simulation.door.wait(0) < 1.5
        assert simulation.door.wait(9) > 10.0 or policy == "fcfs"
        before = len(simulation.seen.refused)
        simulation.come(simulation.now, priority=0)
        assert len(simulation.seen.refused) == before


def test_the_prompts_of_batches_say_nothing_of_others() -> None:
    """Else whoever is on its way would count as long as they are."""
    simulation = Simulation(DEVICES["prompts"])
    peak = capacity(simulation.device)
    simulation.run(0.9 * peak, 10.0, random.Random(7))
    simulation.drain()
    before = simulation.scheduler.queue_stats()
    simulation.device = simulation.device._replace(prompt=3000)
    for _ in range(80):
        simulation.come(simulation.now, background=True)
    simulation.drain()
    after = simulation.scheduler.queue_stats()
    assert after.mean_tokens == before.mean_tokens
    assert after.num_begun == before.num_begun


def test_without_a_limit_nobody_is_refused() -> None:
    simulation = Simulation(DEVICES["rows"], max_seconds=0)
    simulation.run(5 * capacity(simulation.device), 20.0, random.Random(8))
    assert not simulation.seen.refused
