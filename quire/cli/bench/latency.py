"""quire bench latency [MODEL]"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cli import options
from quire.cli.bench.offline import run_shots
from quire.cli.bench.report import ReportConfig, publish
from quire.cli.bench.workload import WorkloadConfig, make_shots
from quire.config.engine import EngineConfig

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, kw_only=True)
class LatencyConfig:
    input_len: int = 32
    """Prompt tokens of a request."""
    output_len: int = 128
    """Tokens to generate a request."""
    batch_size: int = 8
    """Requests that run together."""
    n: int = 1
    """Answers a request."""
    num_iters_warmup: int = 10
    """Batches before the measurement."""
    num_iters: int = 30
    """Batches that are measured."""


def run(arguments: Sequence[str]) -> int:
    values = options.parse(
        "bench latency",
        "Seconds of one batch of equal requests from start to end.",
        arguments,
        (LatencyConfig, ReportConfig, *options.ENGINE_SECTIONS),
        positional=("model",),
        # Equal prompts would be answered from the prefix cache from the second batch on.
        defaults={"enable_prefix_caching": False},
    )
    report = options.section_of(ReportConfig, values)
    numbers = asyncio.run(_measure(options.engine_config(values), options.section_of(LatencyConfig, values)))
    publish("Latency", numbers, report, options=values)
    return 0


async def _measure(config: EngineConfig, settings: LatencyConfig) -> dict[str, Any]:
    from quire.frontend.async_engine import AsyncLLM

    engine = await AsyncLLM.start(config)
    try:
        workload = WorkloadConfig(
            num_prompts=settings.batch_size, input_len=settings.input_len, output_len=settings.output_len
        )
        shots = make_shots(workload, engine.info.resolved.info.vocab_size)
        for _ in range(settings.num_iters_warmup):
            await run_shots(engine, shots, n=settings.n)
        latencies = [(await run_shots(engine, shots, n=settings.n))[0] for _ in range(settings.num_iters)]
    finally:
        engine.shutdown()
    percentiles = {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES}
    return {
        "avg_latency": float(np.mean(latencies)),
        **{f"p{p}_latency": value for p, value in percentiles.items()},
        "percentiles": percentiles,
        "latencies": latencies,
        "device": engine.info.report.device,
    }
