"""quire inspect [MODEL]: what a model is, what it takes and whether it runs here, before its weights are fetched."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from quire.cli import machine, options
from quire.config.devices import resolve_device, runs_on_cpu
from quire.config.engine import EngineConfig
from quire.config.families import family_of
from quire.config.files.checkpoint_files import Stored, stored_in
from quire.config.files.hub_files import stored_on_hub
from quire.config.hardware import Hardware, parse_bytes
from quire.config.hf_config import architecture_of, config_file
from quire.config.inspection import Findings, Question
from quire.config.model import ModelConfig
from quire.config.model_info import read_model_info
from quire.config.parallel.ranks import possible_sizes
from quire.config.resolve import Resolved, locate_model, resolve
from quire.foundation.child import Failure
from quire.foundation.errors import ConfigError
from quire.types.kv import KVGroupSpec

RUNS, REFUSED, TOO_LARGE = 0, 2, 3


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    memory: str | None = None
    """Judge for a GPU of so much memory (80GiB) instead of this machine; with --device cpu, for a CPU."""
    json: bool = False
    """Print one JSON object."""
    quick: bool = False
    """Say only what the files' headers say, format and bytes: at once, without building the model."""


@dataclass(kw_only=True)
class Report:
    model: str
    stored: Stored
    hardware: Hardware
    resolved: Resolved | None = None
    findings: Findings | None = None
    problems: list[str] = dataclasses.field(default_factory=list)  # each keeps it from running
    is_quick: bool = False  # the model was not built

    def note(self, error: ConfigError) -> None:
        """A problem, unless it is known."""
        if str(error) not in self.problems:
            self.problems.append(str(error))

    @property
    def exit_code(self) -> int:
        if self.problems or (self.findings is None and not self.is_quick):
            return REFUSED
        if self.findings is None:
            return RUNS
        return TOO_LARGE if self.findings.too_large else RUNS

    @property
    def verdict(self) -> str:
        where = f"{self.hardware.count} × {self.hardware.name}" if self.hardware.count > 1 else self.hardware.name
        if self.is_quick and not self.problems:
            return "was not asked for: leave out --quick"
        if self.problems or self.findings is None:
            return "cannot run: " + "; ".join(self.problems)
        if self.findings.too_large:
            return f"does not fit on {where}: {self.findings.too_large}"
        best = self.findings.fits[-1]
        return f"runs on {where}: {best.requests} at once of {best.context} tokens"


def run(arguments: Sequence[str]) -> int:
    """Exit code 0 if the model runs, 2 if it cannot, 3 if it does not fit."""
    values = options.parse(
        "inspect",
        "What a model is, what it takes and whether it runs here: from config.json and the headers of its files, "
        "before any weights are fetched. Options of the engine count as they would at its start. "
        "Exit code 0: it runs, 2: it cannot, 3: it does not fit.",
        arguments,
        (InspectConfig, *options.ENGINE_SECTIONS),
        positional=("model",),
    )
    wanted = options.section_of(InspectConfig, values)
    report, question = look(options.engine_config(values), wanted.memory)
    report.is_quick = wanted.quick
    if not wanted.json:
        _print(of_files(report))
    if question is not None and not wanted.quick:
        answer(report, question)
    if wanted.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        _print(of_model(report))
    return report.exit_code


def _print(found: Iterator[tuple[str, str]]) -> None:
    for name, text in found:
        print(f"{name:<15}{text}", flush=True)


def inspect(config: EngineConfig, memory: str | None = None) -> Report:
    """Raises ConfigError for a model that is not there, or a device that is not."""
    report, question = look(config, memory)
    if question is not None:
        answer(report, question)
    return report


def look(config: EngineConfig, memory: str | None = None) -> tuple[Report, Question | None]:
    """What the files say, at once; and what is to be asked of the model that is built of it, None if it cannot be.

    Raises ConfigError as `inspect`."""
    folder = locate_model(config.model, wanted="config")
    hardware = _hardware(config, memory)
    is_local = not config.model.model or any(folder.glob("*.gguf")) or Path(config.model.model).expanduser().is_dir()
    _, is_mistral = config_file(folder, config.model.form)
    stored = stored_in(folder, is_mistral=is_mistral) if is_local else stored_on_hub(config.model)
    report = Report(model=config.model.model or "quire-demo", stored=stored, hardware=hardware)
    report.problems += [f"the checkpoint is broken: {problem}" for problem in stored.problems]
    overrides, refused = _without_refused_keys(folder, config.model)
    report.problems += refused
    local = replace(config.model, model=str(folder), hf_overrides=overrides)
    try:
        report.resolved = resolve(replace(config, model=local), hardware=hardware)
    except ConfigError as error:
        report.note(error)
        return report, None
    return report, Question(report.resolved, hardware)


def answer(report: Report, question: Question) -> None:
    """Build the model, without its numbers."""
    try:
        report.findings = _ask(question)
    except ConfigError as error:
        report.note(error)


def _hardware(config: EngineConfig, memory: str | None) -> Hardware:
    ranks = config.runtime.num_ranks
    if memory is not None:
        wanted, size = config.runtime.device, parse_bytes(memory, "memory")
        device = "cuda" if wanted == "auto" else wanted
        kind = "a CPU" if runs_on_cpu(device) else "a GPU"
        return Hardware(device=device, name=f"{kind} of {_size(size)}", total=size, free=size, count=ranks)
    device = resolve_device(config.runtime.device, [])
    if not runs_on_cpu(device) and (gpus := machine.gpus()[0]):
        smallest = min(gpus[:ranks], key=lambda gpu: gpu.free)
        return Hardware(
            device=device, name=smallest.name, total=smallest.total, free=smallest.free, count=min(ranks, len(gpus))
        )
    total, free = machine.memory()
    return Hardware(device=device, name=f"this machine's {device}", total=total, free=free // ranks, count=ranks)


def _without_refused_keys(folder: Path, model: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """Overrides that make each key of config.json that is refused neutral, and why each is: a start names only the
    first. So the rest of the model can be looked at all the same."""
    config, overrides = config_file(folder, model.form)[0], dict(model.hf_overrides)
    problems: list[str] = []
    tried: set[str] = set()
    while True:
        try:
            read_model_info(folder, overrides, impl=model.model_impl, trusted=model.trust_remote_code, form=model.form)
            return overrides, problems
        except ConfigError as error:
            key = error.field
            if key not in config or key in tried:
                return overrides, problems if key in tried else [*problems, str(error)]
            problems.append(str(error))
            tried.add(key)
            allowed = family_of(architecture_of({**config, **overrides}, "config.json")).fixed.get(key, (None,))
            overrides[key] = allowed[0]


def _ask(question: Question) -> Findings:
    """Another process builds the model without its numbers, since that takes torch. Raises ConfigError."""
    done = subprocess.run(
        [sys.executable, "-m", "quire.worker.inspection"],
        input=msgspec.msgpack.encode(question),
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process alone, which ends the other
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"the process that builds the model died (exit code {done.returncode})", "model")
    is_fine, answer = msgspec.msgpack.decode(done.stdout, type=tuple[bool, msgspec.Raw])
    if not is_fine:
        raise msgspec.msgpack.decode(answer, type=Failure).error()
    return msgspec.msgpack.decode(answer, type=Findings)


# -- what is shown ------------------------------------------------------------------------------------------------


def lines(report: Report) -> Iterator[tuple[str, str]]:
    """Name and text of each."""
    yield from of_files(report)
    yield from of_model(report)


def of_files(report: Report) -> Iterator[tuple[str, str]]:
    yield "model", report.model
    resolved, stored = report.resolved, report.stored
    if resolved is not None:
        info = resolved.info
        yield "architecture", f"{info.architecture}: {_family_file(info.architecture)}"
        yield "context", f"{info.max_position} tokens"
        if info.unknown_keys:
            yield "unknown keys", f"{', '.join(info.unknown_keys)} (they mean nothing to this architecture)"
    if stored.files:
        kinds = ", ".join(f"{count / 1e9:.3f} G {dtype}" for dtype, count in sorted(stored.numbers.items()))
        yield "checkpoint", f"{_size(stored.num_bytes)}, {stored.tensors} tensors in {stored.files} files: {kinds}"
    else:
        yield "checkpoint", "no safetensors files"
    if resolved is not None:
        yield "format", _format(resolved)


def of_model(report: Report) -> Iterator[tuple[str, str]]:
    """What is known once it has been built."""
    resolved, found = report.resolved, report.findings
    if found is not None and resolved is not None:
        yield from _takes(found, resolved)
        yield from _fits(found, resolved)
    yield "verdict", report.verdict


def _format(resolved: Resolved) -> str:
    """How the weights are quantized, by the checkpoint or while it loads."""
    own = resolved.info.quantization
    if not own:
        return "plain" if resolved.quantization is None else f"plain, {resolved.quantization} once it is loaded"
    if types := own.get("types"):  # of GGUF
        counts = Counter(types.values())
        return "gguf: matrices in " + ", ".join(f"{kind} ({count})" for kind, count in counts.most_common())
    keys = {"bits": "bits", "w_bit": "bits", "group_size": "a group", "q_group_size": "a group", "quant_algo": ""}
    told = [f"{own[key]} {what}".strip() for key, what in keys.items() if isinstance(own.get(key), int | str)]
    return ", ".join([str(own["quant_method"]), *told])


def _takes(found: Findings, resolved: Resolved) -> Iterator[tuple[str, str]]:
    active = f", {_count(found.active_parameters)} of them for a token"
    yield "parameters", _count(found.parameters) + (active if found.active_parameters != found.parameters else "")
    formats = ", ".join(f"{_size(held)} {name}" for name, held in found.weight_formats.items())
    yield "weights", f"{_size(found.weight_bytes)} in {resolved.dtype}: {formats}"
    for group in found.groups:
        yield "KV cache", _group(group, found.page_bytes)
    yield "attention", f"{found.attention}; kernels: {found.kernels}"
    yield "ranks", f"tensor_parallel_size may be {', '.join(map(str, possible_sizes(resolved.info)))}"


def _fits(found: Findings, resolved: Resolved) -> Iterator[tuple[str, str]]:
    if found.too_large:
        return
    if not runs_on_cpu(resolved.device):
        yield (
            "activations",
            f"about {_size(found.activation_bytes)} in steps of {resolved.max_num_batched_tokens} tokens",
        )
    if found.note:
        yield "note", found.note
    for fit in found.fits:
        yield "fits", f"{fit.requests} at once of {fit.context} tokens"


def as_json(report: Report) -> dict[str, Any]:
    resolved, found = report.resolved, report.findings
    made: dict[str, Any] = {
        "model": report.model,
        "runs": report.exit_code == RUNS,
        "verdict": report.verdict,
        "problems": report.problems,
        "device": dataclasses.asdict(report.hardware),
        "checkpoint": {
            **dataclasses.asdict(report.stored),
            "bytes": report.stored.num_bytes,
            "bytes_by_type": report.stored.bytes_by_type,
        },
    }
    if resolved is not None:
        info = resolved.info
        made |= {
            "architecture": info.architecture,
            "family": _family_file(info.architecture),
            "context": info.max_position,
            "dtype": resolved.dtype,
            "unknown_keys": list(info.unknown_keys),
            "format": _format(resolved),
            "tensor_parallel_sizes": possible_sizes(info),
            "notes": list(resolved.notes),
        }
    if found is not None:
        made |= msgspec.to_builtins(found)
        for group, spec in zip(made["groups"], found.groups, strict=True):
            group["bytes_per_token"] = 0 if spec.pages else spec.bytes_per_token
            group["bytes_per_request"] = spec.pages * found.page_bytes
    return made


def _family_file(architecture: str) -> str:
    family = family_of(architecture)
    return family.name if family.is_own else family.module.replace(".", "/") + ".py"


def _group(group: KVGroupSpec, page_bytes: int) -> str:
    if group.kind in ("none", "history"):
        return {"none": "nothing is kept", "history": "ids of the tokens"}[group.kind]
    if group.kind == "state":
        size = _size(group.pages * page_bytes)
        return f"{size} a request, and a copy in the prefix cache: state, {group.num_layers} layers"
    window = f" of {group.window} tokens" if group.window else ""
    return f"{_size(group.bytes_per_token)} a token: {group.kind}{window}, {group.num_layers} layers"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} G" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} B" if unit == "B" else f"{number:.2f} {unit}"
