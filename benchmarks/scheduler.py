"""What planning costs: microseconds of `plan` and of `settle` a step, without any model.

    python -m benchmarks.scheduler [--rows 1024] [--steps 400] [--depth 2] [--window 1024]
    python -m benchmarks.scheduler --prompt 32768

window: five of six layers see so many tokens, and so there are two groups of layers.

steady: all rows decode, nobody comes or goes (a block boundary every `block_size` tokens, spread over the rows).
churn: like it, but outputs are short, so that requests end and new ones are admitted nearly every step.
quiet: steady, for requests whose output is wanted only at the end.
drafts: steady where requests may draft and nothing is expected of it; verify: all steps have 4 drafts, half are right.
prefix: admission of prompts that share a long prefix, microseconds a request.
--prompt: instead, what one new prompt of so many tokens costs the core before its first plan is made, and that plan.
    decode: of its message; add: its checks, its place in the queue; find: the names of its blocks, looked up in the
    prefix cache; plan: the first chunk's, without the names. encode: the front end's part, beside.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from quire.engine.messages import Add, ToCore
from quire.foundation.wire import Decoder, Encoder
from quire.scheduling.drafting import Drafting
from quire.scheduling.scheduler import Scheduler
from quire.types.kv import KVGroupSpec
from quire.types.plan import StepPlan
from quire.types.request import EngineRequest, token_array
from quire.types.result import StepResult
from quire.types.sampling import RequestOutputKind, SamplingParams

Make = Callable[[int], EngineRequest]


def make_scheduler(
    rows: int, window: int = 0, max_model_len: int = 8192, drafting: Drafting | None = None
) -> Scheduler:
    groups = [KVGroupSpec("full", 16, 28, 8, 128, 2)]
    if window:
        groups = [KVGroupSpec("full", 80, 6, 8, 128, 2), KVGroupSpec("window", 16, 30, 8, 128, 2, window=window)]
    return Scheduler(
        drafting=drafting,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=max_model_len,
        num_blocks=65_536,
        groups=groups,
    )


def request(number: int, prompt: list[int], max_tokens: int, kind: RequestOutputKind) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, output_kind=kind)
    return EngineRequest(
        id=f"cmpl-{number:032x}",
        token_ids=token_array(prompt),
        params=params,
        max_tokens=max_tokens,
        stop_token_ids=[0, 1],
    )


def answer(plan: StepPlan) -> StepResult:
    right = plan.num_drafts // 2
    tokens = np.full((plan.num_rows, 1 + plan.num_drafts), -1, np.int32)
    tokens[plan.samples, : 1 + right] = 7
    return StepResult(
        step=plan.step,
        tokens=tokens,
        counts=plan.samples.astype(np.int32) * (1 + right),
        drafted=np.full(plan.num_rows, max(1, plan.num_drafts), np.int32),
        matched=np.full(plan.num_rows, right, np.int32),
    )


def drive(scheduler: Scheduler, rows: int, steps: int, depth: int, make: Make) -> tuple[list[float], list[float]]:
    """Keep `rows` requests alive; returns microseconds of plan and of settle a step, once all have a seat."""
    number = 0
    in_flight: deque[tuple[StepPlan, StepResult]] = deque()
    plans: list[float] = []
    settles: list[float] = []
    warm = 0
    while len(plans) < steps:
        for _ in range(rows - alive(scheduler)):
            scheduler.add(make(number))
            number += 1
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None
        in_flight.append((plan, answer(plan)))
        if len(in_flight) < depth:
            continue
        oldest = in_flight.popleft()
        settling = time.perf_counter()
        scheduler.settle(*oldest)
        settled = time.perf_counter()
        warm += plan.num_decodes >= rows * 0.9
        if warm > 20:
            plans.append((planned - start) * 1e6)
            settles.append((settled - settling) * 1e6)
    return plans, settles


def alive(scheduler: Scheduler) -> int:
    stats = scheduler.stats()
    return stats.num_running + stats.num_waiting


def report(name: str, plans: list[float], settles: list[float]) -> None:
    both = [p + s for p, s in zip(plans, settles, strict=True)]
    cells = [f"{statistics.median(times):8.0f} {max(times):8.0f}" for times in (plans, settles, both)]
    print(f"{name:10}{cells[0]}{cells[1]}{cells[2]}")


def report_way_in(length: int, count: int = 60) -> None:
    rng, encoder, decoder = np.random.default_rng(0), Encoder(), Decoder[Add](ToCore)
    scheduler = make_scheduler(8, max_model_len=length + 1)
    found = []
    for number in range(count):
        ids = rng.integers(256, 120_000, length).tolist()
        times = [time.perf_counter()]
        asked = Add(request(number, ids, 16, RequestOutputKind.DELTA))
        times.append(time.perf_counter())
        frames = [bytes(frame) for frame in encoder.encode(asked)]
        times.append(time.perf_counter())
        message = decoder.decode(frames)
        times.append(time.perf_counter())
        scheduler.add(message.request)
        times.append(time.perf_counter())
        [waiting] = scheduler._state.requests.values()
        scheduler.kv.find_cached(waiting, waiting.max_cached)
        times.append(time.perf_counter())
        scheduler.plan()
        times.append(time.perf_counter())
        scheduler.abort([message.request.id])
        found.append(np.diff(times) * 1e6)
    names = ("to an array", "encode", "decode", "add", "find", "plan")
    columns = [sorted(column) for column in zip(*found, strict=True)]
    inward = sorted(sum(row[2:5]) for row in found)
    print(f"a prompt of {length} tokens, block size 16: microseconds, median and least of {count}")
    for name, times in (*zip(names, columns, strict=True), ("decode + add + find", inward)):
        print(f"{name:20}{statistics.median(times):8.0f}{min(times):8.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--window", type=int, default=0, help="0: all layers see everything")
    parser.add_argument("--prompt", type=int, default=0)
    options = parser.parse_args()
    if options.prompt:
        report_way_in(options.prompt)
        return
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 1000) for _ in range(rng.randint(16, 240))] for _ in range(options.rows)]

    def endless(kind: RequestOutputKind) -> Make:
        return lambda i: request(i, prompts[i % len(prompts)], 4096, kind)

    def brief(i: int) -> EngineRequest:
        return request(i, prompts[i % len(prompts)], 64 + i % 512, RequestOutputKind.DELTA)

    print(f"{options.rows} rows, depth {options.depth}; microseconds a step, median and worst")
    print(f"{'':10}{'plan':>17}{'settle':>17}{'both':>17}")
    for name, make, drafting in (
        ("steady", endless(RequestOutputKind.DELTA), None),
        ("churn", brief, None),
        ("quiet", endless(RequestOutputKind.FINAL_ONLY), None),
        ("drafts", endless(RequestOutputKind.DELTA), Drafting(4, options.rows, options.rows)),
        ("verify", endless(RequestOutputKind.DELTA), Drafting(4, options.rows, options.rows, always=True)),
    ):
        scheduler = make_scheduler(options.rows, options.window, drafting=drafting)
        gc.collect()
        gc.freeze()  # as the engine core does once it is up: the pool's blocks are no garbage
        report(name, *drive(scheduler, options.rows, options.steps, options.depth, make))

    scheduler = make_scheduler(options.rows, options.window)
    shared = [rng.randrange(2, 1000) for _ in range(4096)]
    count = min(256, options.rows)
    for i in range(count):
        scheduler.add(request(i, shared + prompts[i][:16], 16, RequestOutputKind.DELTA))
    start, computed = time.perf_counter(), 0
    while plan := scheduler.plan():
        computed += int(plan.num_tokens.sum())
        scheduler.settle(plan, answer(plan))
    spent = (time.perf_counter() - start) * 1e6 / count
    print(f"prefix    {count} prompts of 4096 shared + 16 own tokens, 16 of output: ", end="")
    print(f"{computed} tokens computed, {spent:.0f} us a request")


if __name__ == "__main__":
    main()
