"""An engine whose scheduler is the real one, and whose device is a clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.engine.core import LONGEST_HOLD, MARGIN_SHARE, PLAN_MARGIN
from quire.scheduling.scheduler import Scheduler
from quire.simulation.costs import StepCosts
from quire.types.kv import KVGroupSpec
from quire.types.output import EngineStats
from quire.types.plan import StepPlan
from quire.types.request import EngineRequest
from quire.types.result import StepResult

_TOKEN = 1  # that every row samples: nothing ends but by its length


@dataclass(slots=True)
class Times:
    """Of a request, in seconds of the simulated clock."""

    arrival: float
    first: float = 0.0  # token
    last: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    work: float
    submitted: float
    ends: float


class SimulatedCore:
    """Makes the turns of a core: plans while there is room, then waits for the oldest step."""

    def __init__(self, costs: StepCosts) -> None:
        self.now = 0.0
        self.times: dict[str, Times] = {}
        self.ended: list[str] = []  # since somebody emptied it
        self.begun: list[str] = []  # likewise
        self.num_steps = 0
        self.busy = 0.0  # seconds of the device
        self._costs, self._host = costs, costs.host
        self._arriving: deque[tuple[float, EngineRequest]] = deque()  # when each is at the core
        self._front_free = 0.0  # when the front end has handed over what came
        self._in_flight: deque[_Step] = deque()
        self._device_free = 0.0
        self._groups: list[tuple[set[int], int]] = []  # seats whose contexts begin alike, and in how many tokens
        self._last_result = 0.0
        self._planning_seconds = 0.0  # that the latest plan took, its launch included
        self._lengths = np.zeros(costs.max_num_seqs + 1, np.int64)  # tokens computed, by seat
        spec = KVGroupSpec("full", costs.block_size, 1, 1, 1, 2)
        self._scheduler = Scheduler(
            max_num_seqs=costs.max_num_seqs, max_num_batched_tokens=costs.max_num_batched_tokens,
            max_model_len=costs.max_model_len, num_blocks=costs.num_blocks, groups=[spec], hash_seed=b"simulation",
            clock=lambda: self.now, mixed_sizes=costs.mixed_sizes, prompt_cost=costs.prompt_cost,
        )  # fmt: skip

    def add(self, request: EngineRequest) -> None:
        """It arrives at its time, in the order of arrival. Raises InputError, in `run_until`, if it can never run."""
        taken = self._host.request_us + len(request.token_ids) * self._host.prompt_token_us
        self._front_free = max(self._front_free, request.arrival) + taken / 1e6
        self._arriving.append((self._front_free, request))
        self.times[request.id] = Times(request.arrival)

    def hold_together(self) -> None:
        """Nothing begins before all that was added is handed over, as offline."""
        self._arriving = deque((self._front_free, request) for _, request in self._arriving)

    def stats(self) -> EngineStats:
        """As a core reports them."""
        stats = self._scheduler.stats()
        stats.queue = msgspec.structs.replace(self._scheduler.queue_stats(), as_of=float("inf"))
        return stats

    @property
    def has_work(self) -> bool:
        return bool(self._arriving or self._in_flight or self._scheduler.has_work)

    def run_until(self, time: float) -> None:
        """Make turns until the clock is there, or nothing is left to do."""
        while self.now < time and self.has_work:
            if not self._in_flight and not self._scheduler.has_work:
                arrival = self._arriving[0][0]
                if arrival >= time:
                    break
                self.now = max(self.now, arrival)
            self._turn()

    def _turn(self) -> None:
        self._hold()
        while self._arriving and self._arriving[0][0] <= self.now:
            self._scheduler.add(self._arriving.popleft()[1])
        while len(self._in_flight) < self._costs.depth:
            plan = self._scheduler.plan()
            if plan is None:
                break
            self._submit(plan)
        if self._in_flight:
            self._settle(self._in_flight.popleft())

    def _hold(self) -> None:
        """As the core does, which guesses when the steps in flight end: who comes while one runs is in the next."""
        if not 0 < len(self._in_flight) < self._costs.depth or not self._scheduler.can_be_late:
            return
        first = self._in_flight[0].submitted
        ends = first
        for step in self._in_flight:
            ends = max(ends, self._last_result, step.submitted) + self._scheduler.prefill_budget.predict(step.work)
        pause = ends - self.now - max(PLAN_MARGIN, MARGIN_SHARE * (ends - first)) - self._planning_seconds
        self.now += max(0.0, min(pause, LONGEST_HOLD))

    def _submit(self, plan: StepPlan) -> None:
        for admit in plan.admits:
            self._lengths[admit.seat] = admit.num_computed
        np.add.at(self._lengths, plan.seats, plan.num_tokens)
        began = self.now
        submitted = self.now = began + self._planning(plan)
        seconds = self._costs.seconds(plan, self._lengths[plan.seats], self._shared(plan))
        start = max(self._device_free, submitted)
        if not self._costs.padded(plan):
            self.now += self._host.eager_ms / 1e3
        self._device_free = max(start + seconds, self.now)
        self.busy += seconds
        self.num_steps += 1
        self._in_flight.append(_Step(plan, self._scheduler.planned_work, submitted, self._device_free))
        self._planning_seconds = self.now - began

    def _planning(self, plan: StepPlan) -> float:
        """Seconds of the host until the plan is with the worker, the settling of an earlier step included."""
        host = self._host
        taken = host.step_us + len(plan.seats) * host.row_us
        for admit in plan.admits:
            taken += host.admit_us + admit.num_computed * host.found_token_us
            taken += max(0, admit.num_prompt - admit.num_computed) * host.admit_token_us
        return taken / 1e6

    def _shared(self, plan: StepPlan) -> int:
        """Tokens of beginnings that decode rows have in common, but for one row of each group."""
        if (found := plan.prefixes) is not None:
            ends = [*found.starts[1:].tolist()]
            groups = zip(found.starts.tolist(), ends, found.num_tokens.tolist(), strict=False)
            self._groups = [(set(found.seats[start:end].tolist()), tokens) for start, end, tokens in groups]
        for seats, _ in self._groups:
            seats.difference_update(plan.releases)
        decoding = set(plan.seats[: plan.num_decodes].tolist())
        return sum(max(0, len(seats & decoding) - 1) * tokens for seats, tokens in self._groups)

    def _settle(self, step: _Step) -> None:
        plan = step.plan
        self.now = max(self.now, step.ends)
        prompt_tokens = int(plan.num_tokens.sum()) - plan.num_decodes
        seconds = self.now - max(step.submitted, self._last_result)
        self._scheduler.observe(step.work, prompt_tokens, seconds, seconds)
        self._last_result = self.now
        tokens = np.where(plan.samples, _TOKEN, -1).astype(np.int32).reshape(-1, 1)
        counts = plan.samples.astype(np.int32)
        result = StepResult(step=plan.step, tokens=tokens, counts=counts)
        outputs = self._scheduler.settle(plan, result)
        for output in outputs.each():
            times = self.times[output.request_id]
            if output.token_ids and not times.num_tokens:
                times.first = self.now
                self.begun.append(output.request_id)
            times.num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                times.last = self.now
                self.ended.append(output.request_id)
