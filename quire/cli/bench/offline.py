"""What the in-process benchmarks share: an engine, and requests that run through it together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.cli.bench.workload import Shot
from quire.types.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.frontend.async_engine import AsyncLLM


async def run_shots(engine: AsyncLLM, shots: Sequence[Shot], *, n: int = 1) -> tuple[float, int]:
    """Run all shots at once. Returns seconds and generated tokens."""
    started = time.perf_counter()
    counts = await asyncio.gather(*(_run_one(engine, f"shot-{i}", shot, n) for i, shot in enumerate(shots)))
    return time.perf_counter() - started, sum(counts)


async def _run_one(engine: AsyncLLM, request_id: str, shot: Shot, n: int) -> int:
    params = SamplingParams(
        n=n,
        temperature=1.0 if n > 1 else 0.0,
        max_tokens=shot.output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    count = 0
    async for output in engine.generate({"prompt_token_ids": shot.token_ids}, params, request_id):
        count += sum(len(answer.token_ids) for answer in output.outputs)
    return count
