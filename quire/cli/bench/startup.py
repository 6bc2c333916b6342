"""quire bench startup [MODEL]"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.cli import options
from quire.cli.bench.offline import run_shots
from quire.cli.bench.report import ReportConfig, publish, spread
from quire.cli.bench.workload import Shot
from quire.config.engine import EngineConfig
from quire.foundation.errors import QuireError

ONCE = "--one-start"  # said to the child process: start once, print the numbers


@dataclass(frozen=True, kw_only=True)
class StartupConfig:
    num_iters_warmup: int = 1
    """Starts before the measurement (they fill the caches of files and kernels)."""
    num_iters_warm: int = 3
    """Starts that are measured."""


def run(arguments: Sequence[str]) -> int:
    once = ONCE in arguments
    arguments = [argument for argument in arguments if argument != ONCE]
    values = options.parse(
        "bench startup",
        "Seconds from nothing to the first token, each time in a fresh process.",
        arguments,
        (StartupConfig, ReportConfig, *options.ENGINE_SECTIONS),
        positional=("model",),
    )
    report = options.section_of(ReportConfig, values)
    if once:
        print(json.dumps(asyncio.run(_start_once(options.engine_config(values)))))
        return 0
    settings = options.section_of(StartupConfig, values)
    runs = [_start_in_process(arguments) for _ in range(settings.num_iters_warmup + settings.num_iters_warm)]
    measured = runs[settings.num_iters_warmup :]
    totals = [one["total"] for one in measured]
    numbers: dict[str, Any] = {f"{name}_startup_s": value for name, value in spread(totals).items()}
    numbers |= {f"phase_{name}_s": seconds for name, seconds in measured[-1]["phases"].items()}
    numbers["startups_s"] = totals
    publish("Start-up", numbers, report, options=values, runs=runs)
    return 0


def _start_in_process(arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "quire.cli.main", "bench", "startup", *arguments, ONCE]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    total = time.perf_counter() - started
    if done.returncode:
        raise QuireError(f"the engine did not start (exit code {done.returncode})")
    numbers = json.loads(done.stdout.splitlines()[-1])
    numbers["phases"]["process, imports, exit"] = total - sum(numbers["phases"].values())
    return {**numbers, "total": total}


async def _start_once(config: EngineConfig) -> dict[str, Any]:
    from quire.frontend.async_engine import AsyncLLM

    engine = await AsyncLLM.start(config)
    try:
        first, _ = await run_shots(engine, [Shot([0], 1)])
    finally:
        engine.shutdown()
    return {"phases": {**engine.info.report.phases, "first token": first}, "device": engine.info.report.device}
