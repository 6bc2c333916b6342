"""A trace through one or several simulated engines, and what came of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from quire.engine.balance import Balancer
from quire.engine.messages import EngineInfo
from quire.simulation.core import SimulatedCore
from quire.simulation.costs import StepCosts
from quire.types.kv import KVGroupSpec, WorkerReport
from quire.types.request import EngineRequest

REPORT_SECONDS = 0.2  # between two reports of a core
Policy = Literal["prefix", "round_robin"]


class Quantiles(msgspec.Struct, frozen=True):
    """In milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Quantiles:
        values = 1000 * np.asarray(seconds or [0.0])
        return cls(float(values.mean()), *map(float, np.percentile(values, [50, 90, 99])))


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Of a whole trace."""

    requests: int
    seconds: float  # from the first arrival to the last token
    output_tokens_per_second: float
    total_tokens_per_second: float
    requests_per_second: float
    first_token: Quantiles
    token_gap: Quantiles  # mean of each request
    whole: Quantiles
    cached_tokens: int
    preemptions: int
    steps: int
    busy: list[float]  # share of each engine's time in which it computed


def simulate(
    requests: Sequence[EngineRequest],
    costs: StepCosts,
    replicas: int = 1,
    policy: Policy = "prefix",
    *,
    together: bool = False,
) -> Prediction:
    """requests: in the order of their arrival. together: none begins before all are handed over, as offline.

    Raises InputError for a request that can never run.
    """
    cores = [SimulatedCore(costs) for _ in range(replicas)]
    balancer = Balancer(replicas, _info(costs))
    turns, due = itertools.count(), 0.0
    for request in requests:
        for number, core in enumerate(cores):
            core.run_until(request.arrival)
            _note(balancer, core)
            if request.arrival >= due:
                balancer.report(number, core.stats())
        due = max(due, request.arrival + REPORT_SECONDS) if request.arrival >= due else due
        number = next(turns) % replicas
        if policy == "prefix" and replicas > 1:
            number = balancer.choose(request, range(replicas))
        cores[number].add(request)
    for core in cores:
        if together:
            core.hold_together()
        core.run_until(float("inf"))
    return _prediction(requests, cores)


def _note(balancer: Balancer, core: SimulatedCore) -> None:
    for request_id in core.begun:
        balancer.begin(request_id)
    balancer.end(core.ended)
    core.begun.clear()
    core.ended.clear()


def _info(costs: StepCosts) -> EngineInfo:
    report = WorkerReport(
        device=costs.device, num_blocks=costs.num_blocks, max_model_len=costs.max_model_len,
        groups=[KVGroupSpec("full", costs.block_size, 1, 1, 1, 2)], vocab_size=0, weight_bytes=0, kv_bytes=0,
        free_bytes=0, attention_backend="", phases={},
    )  # fmt: skip
    return EngineInfo(None, report)  # type: ignore[arg-type]


def _prediction(requests: Sequence[EngineRequest], cores: Sequence[SimulatedCore]) -> Prediction:
    times = [each for core in cores for each in core.times.values()]
    began = min(each.arrival for each in times)
    seconds = max(each.last for each in times) - began
    output = sum(each.num_tokens for each in times)
    prompts = sum(len(request.token_ids) for request in requests)
    stats = [core.stats() for core in cores]
    return Prediction(
        requests=len(times),
        seconds=seconds,
        output_tokens_per_second=output / seconds,
        total_tokens_per_second=(output + prompts) / seconds,
        requests_per_second=len(times) / seconds,
        first_token=Quantiles.of([each.first - each.arrival for each in times]),
        token_gap=Quantiles.of([(e.last - e.first) / (e.num_tokens - 1) for e in times if e.num_tokens > 1]),
        whole=Quantiles.of([each.last - each.arrival for each in times]),
        cached_tokens=sum(each.cached_tokens for each in stats),
        preemptions=sum(each.num_preemptions for each in stats),
        steps=sum(core.num_steps for core in cores),
        busy=[core.busy / seconds for core in cores],
    )
