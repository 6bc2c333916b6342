"""The work of steps, as it is estimated, against the same counted out for a model of known shape."""

from __future__ import annotations

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.observe.work import WorkMeter
from quire.types.kv import KVGroupSpec, ModelWork, PromptCost
from quire.types.output import EngineStats
from quire.types.view import StepWork

GROUP = KVGroupSpec("full", 16, num_layers=2, num_kv_heads=2, head_dim=8, dtype_bytes=2)  # 128 bytes a token
WORK = ModelWork(weights=1000, head_weights=500, dense_bytes=3000, expert_bytes=[(1, 100.0), (4, 300.0)])
RATES = (1e6, 2e9)  # bytes and operations a second


def test_a_step_is_what_its_rows_take() -> None:
    work = msgspec.structs.replace(WORK, copy_rate=RATES[0], product_rate=RATES[1])
    meter = WorkMeter(work, PromptCost(attention=0.5), [GROUP])
    meter.add(StepWork(tokens=3, samples=2, read=40, attended=40.0))
    assert meter.operations == 2 * 1000 * 3 + 2 * 500 * 2 + 2 * 1000 * 0.5 * 40
    assert meter.read_bytes == 3000 + 300 + 128 * 40  # the experts that 4 tokens hit: the next size that is known
    assert meter.written_bytes == 128 * 3
    bandwidth, rate = RATES
    assert meter.floor_seconds == max((meter.read_bytes + meter.written_bytes) / bandwidth, meter.operations / rate)
    meter.add(StepWork(tokens=1000, samples=0, read=0, attended=0.0))
    stats = EngineStats()
    meter.tell(stats)
    assert stats.read_bytes == meter.read_bytes == 3000 * 2 + 300 * 2 + 128 * 40
    unknown = WorkMeter(WORK, PromptCost(), [GROUP])
    unknown.add(StepWork(1, 1, 1, 1.0))
    assert unknown.floor_seconds == 0.0


def test_an_engine_counts_its_prompt_and_its_steps() -> None:
    with LLM(device="cpu", dtype="float32", enable_mfu_metrics=True) as llm:
        names = {metric.name: metric for metric in llm.get_metrics()}
        before = {name: names[name].value for name in names if "estimated" in name}  # type: ignore[attr-defined]
        prompt = list(range(10, 110))
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        after = {metric.name: metric.value for metric in llm.get_metrics()}  # type: ignore[attr-defined]
        report = llm.info.report
    assert after["quire:step_floor_seconds"] > 0  # measured for a moment at the start
    work, [group] = report.model_work, report.groups
    name = "vllm:estimated_{}_per_gpu".format
    written = after[name("write_bytes")] - before.get(name("write_bytes"), 0.0)
    assert written == pytest.approx(group.bytes_per_token * (100 + 7))
    operations = after[name("flops")] - before.get(name("flops"), 0.0)
    least = 2.0 * (work.weights * 107 + work.head_weights * 8)
    assert least < operations < 1.5 * least  # attention comes to it
    read = after[name("read_bytes")] - before.get(name("read_bytes"), 0.0)
    assert 8 * work.dense_bytes < read < 8 * work.dense_bytes + group.bytes_per_token * 8 * 110


def test_nothing_is_counted_that_nobody_asked_for() -> None:
    with LLM(device="cpu", dtype="float32") as llm:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2))
        assert not any("estimated" in metric.name for metric in llm.get_metrics())
