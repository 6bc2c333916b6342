"""quire bench throughput [MODEL]"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.cli import options
from quire.cli.bench.offline import run_shots
from quire.cli.bench.report import ReportConfig, publish
from quire.cli.bench.workload import WorkloadConfig, make_shots
from quire.config.engine import EngineConfig


@dataclass(frozen=True, kw_only=True)
class ThroughputConfig:
    n: int = 1
    """Answers a request."""
    num_warmups: int = 1
    """Requests that run, and are not counted, before the measurement."""


def run(arguments: Sequence[str]) -> int:
    values = options.parse(
        "bench throughput",
        "Tokens a second of many requests that are all there at once.",
        arguments,
        (WorkloadConfig, ThroughputConfig, ReportConfig, *options.ENGINE_SECTIONS),
        positional=("model",),
    )
    report = options.section_of(ReportConfig, values)
    workload = options.section_of(WorkloadConfig, values)
    settings = options.section_of(ThroughputConfig, values)
    numbers = asyncio.run(_measure(options.engine_config(values), workload, settings))
    publish("Throughput", numbers, report, options=values)
    return 0


async def _measure(config: EngineConfig, workload: WorkloadConfig, settings: ThroughputConfig) -> dict[str, Any]:
    from quire.frontend.async_engine import AsyncLLM

    engine = await AsyncLLM.start(config)
    try:
        shots = make_shots(workload, engine.info.resolved.info.vocab_size)
        await run_shots(engine, shots[: settings.num_warmups])
        seconds, generated = await run_shots(engine, shots, n=settings.n)
    finally:
        engine.shutdown()
    prompt = sum(len(shot.token_ids) for shot in shots)
    return {
        "elapsed_time": seconds,
        "num_requests": len(shots),
        "total_num_tokens": prompt + generated,
        "requests_per_second": len(shots) / seconds,
        "tokens_per_second": (prompt + generated) / seconds,
        "output_tokens_per_second": generated / seconds,
        "device": engine.info.report.device,
    }
