"""quire profile [MODEL]: where the time of prompts and of decode steps goes, beside what it would take at best."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cli import options
from quire.cli.bench.report import ReportConfig, check_folder, publish
from quire.foundation.errors import ConfigError

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.worker.module_times import Device

MOST_OPS = 12


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    batch_size: int = 4
    """Requests that run together."""
    input_len: int = 256
    """Prompt tokens of a request."""
    output_len: int = 16
    """Tokens to generate a request; all but the first are decode steps."""
    trace: str | None = None
    """Folder for a trace of torch's profiler (Perfetto, chrome://tracing), layers by name. None: none is kept."""


def run(arguments: Sequence[str]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch comes: its profiler talks about itself otherwise
    values = options.parse(
        "profile",
        "Where the time of a step goes, by layer and by operation, beside its floor. Layers run one by one "
        "(enforce_eager), so that each can be timed: a whole step is faster where graphs replay it.",
        arguments,
        (ProfileConfig, ReportConfig, *options.ENGINE_SECTIONS),
        positional=("model",),
        defaults={"disable_log_stats": True, "enable_prefix_caching": False},
    )
    config, report = options.section_of(ProfileConfig, values), options.section_of(ReportConfig, values)
    for name in ("batch_size", "input_len", "output_len"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} must be >= 1, got {getattr(config, name)}", name)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"):
        if values[name] != 1:
            raise ConfigError(f"quire profile looks into one process: {name} must be 1", name)
    if config.trace is not None:
        check_folder(config.trace, "trace")
    names = {one.name for section in options.ENGINE_SECTIONS for one in dataclasses.fields(section)}
    engine = {name: value for name, value in values.items() if name in names} | {"enforce_eager": True}
    numbers = _profile(config, engine)
    publish("Profile", {}, report, options=values, **numbers)
    return 0


def _profile(config: ProfileConfig, engine: dict[str, Any]) -> dict[str, Any]:
    from quire.llm import LLM
    from quire.worker.module_times import measure_device

    with LLM(**engine) as llm:
        vocab = llm.llm_engine.info.report.vocab_size
        random = np.random.default_rng(0)
        # Each run has prompts of its own: none is found in the cache, should it be on.
        first, second, third = random.integers(0, vocab, (3, config.batch_size, config.input_len)).tolist()
        _generate(llm, first, config.output_len)  # what is slow only once
        (model,) = llm.apply_model(lambda model: model)
        weight = next(model.parameters())
        device = measure_device(weight.device, weight.dtype)
        print(
            f"Floors by what this device does at best, as measured: {device.bytes_a_second / 1e9:,.1f} GB/s of a copy, "
            f"{2 * device.products_a_second / 1e12:,.2f} TFLOP/s of a product of matrices"
        )
        layers = _by_layer(llm, model, device, second, config)
        return {**layers, **_by_op(llm, model, device, third, config), "device": vars(device)}


def _generate(llm: LLM, prompts: list[list[int]], num_tokens: int) -> None:
    from quire.types.sampling import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def _by_layer(llm: LLM, model: Any, device: Device, prompts: list[list[int]], config: ProfileConfig) -> dict[str, Any]:
    from quire.worker.module_times import ModuleTimes

    times = ModuleTimes(model, llm.llm_engine.info.report.groups, next(model.parameters()).device)
    middle = config.input_len + config.output_len // 2
    times.contexts[config.batch_size] = config.batch_size * middle  # of the decode step in the middle
    times.open()
    try:
        _generate(llm, prompts, config.output_len)
    finally:
        times.close()
    layers = times.layers(device)
    for tokens in sorted({layer.tokens for layer in layers}, reverse=True):
        rows = [layer for layer in layers if layer.tokens == tokens]
        total, floors = sum(layer.seconds for layer in rows), sum(layer.floor for layer in rows)
        steps = max(math.gcd(*(layer.calls for layer in rows)) // times.smallest_stack, 1)
        kind = "decode" if tokens == config.batch_size and config.output_len > 1 else "prompts"
        a_step = f"{total / steps * 1e3:,.3f} ms a step, floor {floors / steps * 1e3:,.3f} ms"
        print(f"\n{kind}, steps of {tokens} tokens ({steps} of them): {a_step}")
        print(f"  {'layer':<34}{'calls':>7}{'ms a step':>12}{'share':>8}{'floor ms':>11}{'x floor':>9}")
        for layer in rows:
            ms, floor = layer.seconds / steps * 1e3, layer.floor / steps * 1e3
            figures = f"{layer.calls // steps:>7}{ms:>12,.3f}{layer.seconds / total:>8.1%}"
            print(f"  {layer.name:<34}{figures}{_beside(ms, floor)}")
    return {"layers": [vars(layer) for layer in layers]}


def _beside(value: float, floor: float) -> str:
    return f"{floor:>11,.3f}{value / floor:>9.1f}" if floor else f"{'-':>11}{'-':>9}"


def _by_op(llm: LLM, model: Any, device: Device, prompts: list[list[int]], config: ProfileConfig) -> dict[str, Any]:
    """Such a run again under torch's profiler."""
    import torch

    from quire.worker.module_times import op_floor
    from quire.worker.ranges import Ranges

    weight = next(model.parameters())
    on_device = weight.device.type == "cuda"
    activities = torch.profiler.ProfilerActivity
    kinds = [activities.CPU, activities.CUDA] if on_device else [activities.CPU]
    ranges = Ranges(model, nvtx=False)
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
        ranges.open()
        _generate(llm, prompts, config.output_len)
        ranges.close()
    found: dict[str, dict[str, Any]] = {}
    own = {name for name, _ in model.named_modules()}
    for event in profiler.key_averages(group_by_input_shape=True):
        if event.key in own:
            continue
        op = found.setdefault(event.key, {"op": event.key, "calls": 0, "seconds": 0.0, "floor": 0.0})
        op["calls"] += event.count
        op["seconds"] += (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
        op["floor"] += event.count * op_floor(event.key, event.input_shapes, weight.element_size(), device)
    ops = sorted(found.values(), key=lambda op: -op["seconds"])
    total = sum(op["seconds"] for op in ops) or 1.0
    print(f"\noperations {'on the device' if on_device else 'on the CPU'}, all steps together: {total * 1e3:,.1f} ms")
    print(f"  {'operation':<41}{'calls':>7}{'ms':>12}{'share':>8}{'floor ms':>11}{'x floor':>9}")
    for op in ops[:MOST_OPS]:
        ms = op["seconds"] * 1e3
        figures = f"{op['calls']:>7}{ms:>12,.3f}{op['seconds'] / total:>8.1%}"
        print(f"  {op['op'][:40]:<41}{figures}{_beside(ms, op['floor'] * 1e3)}")
    if config.trace is not None:
        file = Path(config.trace) / "quire.pt.trace.json.gz"
        profiler.export_chrome_trace(str(file))
        print(f"\ntrace in {file}")
    return {"ops": ops}
