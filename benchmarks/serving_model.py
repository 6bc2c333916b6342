"""T5 without a device and without HTTP: the real scheduler before a model of what steps take, in virtual time.

    python -m benchmarks.serving_model [--rates 4 16 32 64 inf] [--seconds 25] [--eager-ms 0]

Shows what the pace of prompts and late planning do to waiting times, in seconds instead of minutes of a GPU. A step of
llama-3.1-8b on one H200: a decode step takes 3.9 ms, 14 µs a row and its KV at 4 TB/s; prompt tokens 24.5 µs each.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from benchmarks import workloads
from benchmarks.serve_load import percentile
from quire.engine.core import PLAN_MARGIN
from quire.scheduling.scheduler import Scheduler
from quire.types.kv import KVGroupSpec
from quire.types.plan import StepPlan
from quire.types.request import EngineRequest, token_array
from quire.types.result import StepResult
from quire.types.sampling import RequestOutputKind, SamplingParams

WEIGHTS, ROW, KV_TOKEN, PROMPT_TOKEN = 3.9e-3, 14e-6, 131_072 / 4.0e12, 24.5e-6  # seconds
LAUNCH, LAUNCH_MIXED = 0.4e-3, 1.4e-3  # seconds of the host for a step from graphs
HOST = 0.2e-3  # seconds of plan and of settle
DEPTH = 2


@dataclass
class Step:
    plan: StepPlan
    work: float
    submitted: float
    ends: float


class Model:
    """The core's loop and the device, in virtual time. eager: seconds of the host for a step with prompts, if more."""

    def __init__(self, eager: float, paced: bool, late: bool) -> None:
        self.now = 0.0
        self.eager = eager
        self.late = late
        self.scheduler = Scheduler(
            max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=131_072, num_blocks=56_637,
            groups=[KVGroupSpec("full", 16, 32, 8, 128, 2)], clock=lambda: self.now,
        )  # fmt: skip
        self.paced = paced
        self.in_flight: deque[Step] = deque()
        self.free = 0.0  # when the device has done all it was given
        self.last = 0.0  # when the latest result came
        self.planning = 0.0
        self.context: dict[int, int] = {}  # tokens with KV, by seat

    def run(self, work: list[tuple[float, list[int], int]]) -> dict[str, list[float]]:
        """Answer all of `work`: the times at which each request came and got its tokens, by number."""
        coming = deque(enumerate(work))
        times: dict[str, list[float]] = {}
        while coming or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now = max(self.now, coming[0][1][0])
            self._hold()
            while coming and coming[0][1][0] <= self.now:
                number, (arrival, ids, out) = coming.popleft()
                params = SamplingParams(max_tokens=out, output_kind=RequestOutputKind.DELTA)
                self.scheduler.add(
                    EngineRequest(id=str(number), token_ids=token_array(ids), params=params, max_tokens=out)
                )
                times[str(number)] = [arrival]
            self._submit()
            for name in self._settle():
                times[name].append(self.now)
        return times

    def _hold(self) -> None:
        if not self.late or not 0 < len(self.in_flight) < DEPTH or not self.scheduler.can_be_late:
            return
        step = self.in_flight[0]
        ends = max(step.submitted, self.last) + self.scheduler.prefill_budget.predict(step.work)
        self.now = max(self.now, ends - PLAN_MARGIN - self.planning)

    def _submit(self) -> None:
        while len(self.in_flight) < DEPTH and (plan := self.scheduler.plan()) is not None:
            began = self.now
            submitted = self.now = began + HOST
            count = int(plan.num_tokens.sum()) - plan.num_decodes
            launch = max(LAUNCH_MIXED, self.eager) if count else LAUNCH
            starts = max(self.free, submitted + min(launch, 1e-3))
            self.now += launch
            self.free = max(starts + self._seconds(plan, count), self.now)
            self.in_flight.append(Step(plan, self.scheduler.planned_work, submitted, self.free))
            self.planning = self.now - began

    def _seconds(self, plan: StepPlan, prompt_tokens: int) -> float:
        for admit in plan.admits:
            self.context[admit.seat] = admit.num_computed
        for seat, count in zip(plan.seats.tolist(), plan.num_tokens.tolist(), strict=True):
            self.context[seat] += count
        context = sum(self.context[seat] for seat in plan.seats[: plan.num_decodes].tolist())
        decode = WEIGHTS + plan.num_decodes * ROW + context * KV_TOKEN
        if prompt_tokens == 0:
            return decode
        # Weights are read once for all tokens, so a part of that time is in the prompt tokens'.
        return max(decode, decode - 0.35 * WEIGHTS + PROMPT_TOKEN * prompt_tokens)

    def _settle(self) -> list[str]:
        if not self.in_flight:
            return []
        step = self.in_flight.popleft()
        self.now = max(self.now, step.ends)
        if self.paced:
            self.scheduler.prefill_budget.observe(step.work, self.now - max(step.submitted, self.last))
        self.last = self.now
        tokens = np.where(step.plan.samples, 7, -1).astype(np.int32)
        news = self.scheduler.settle(step.plan, StepResult(step=step.plan.step, tokens=tokens[:, None], counts=tokens))
        self.now += HOST
        return [output.request_id for output in news.each()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=[4, 16, 32, 64, math.inf])
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--eager-ms", type=float, default=0.0, help="host time of a step with prompts without a graph")
    args = parser.parse_args()
    print(f"{'rate':>5} {'':12}{'tok/s':>7}{'TTFT p50':>10}{'p99':>9}{'gap p50':>9}{'p99':>8}{'max':>7}  (ms)")
    for rate in args.rates:
        work = workloads.t5(rate, args.seconds)
        for name, paced, late in (("whole steps", False, False), ("paced", True, False), ("paced, late", True, True)):
            times = list(Model(args.eager_ms / 1e3, paced, late).run(work).values())
            first = [t[1] - t[0] for t in times]
            gaps = [b - a for t in times for a, b in itertools.pairwise(t[1:])]
            rate_out = (len(gaps) + len(first)) / max(t[-1] for t in times)
            figures = [percentile(v, share) * 1e3 for v, share in ((first, 50), (first, 99), (gaps, 50), (gaps, 99))]
            print(f"{rate:5g} {name:12}{rate_out:7.0f}{figures[0]:10.1f}{figures[1]:9.1f}{figures[2]:9.1f}"
                  f"{figures[3]:8.1f}{max(gaps) * 1e3:7.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
