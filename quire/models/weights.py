"""Weights into a built model: from a checkpoint, checked as a whole before a byte is read, or random ones.

The model's modules say where each parameter comes from (`Linear.parts`); nothing else knows a checkpoint's layout.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from quire.foundation.errors import WeightsError
from quire.models.base import Model
from quire.models.safetensors_file import Entry, MalformedFileError, SafetensorsFile
from quire.models.transfer import NotFiniteError, transfer

INDEX = "model.safetensors.index.json"
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NOT_PARAMETERS = re.compile(r"\.rotary_emb\.inv_freq$")  # tables that old checkpoints carry; we compute them
_SHOWN = 20  # lines of one kind in an error


def load(model: Model, folder: Path, load_format: str, show_progress: bool = False, seed: int = 0) -> None:
    """Set every parameter of `model`.

    load_format: "auto" and "safetensors" read the checkpoint in `folder`, "dummy" draws random weights from `seed`.
    show_progress: a bar on the terminal, if there is one.
    Raises WeightsError listing all that is missing, left over, misshapen or unreadable, and for tensors that hold NaN
    or infinities, or that the config says are one and the same and are not.
    """
    if load_format == "dummy":
        fill_randomly(model, seed)
        return
    targets = parameter_targets(model)
    with ExitStack() as stack:
        checkpoint = _Checkpoint(folder, model, targets, stack)
        twins = {name: of for name, of in model.twins.items() if name in checkpoint.tensors}
        targets |= {name: torch.empty_like(targets[of]) for name, of in twins.items()}
        checkpoint.check(targets)
        try:
            _read(checkpoint, targets, stack, show_progress)
        except (MalformedFileError, OSError) as error:
            raise WeightsError(f"the weights in {folder} could not be read: {error}", "model") from error
        except NotFiniteError as error:
            name = next(name for name, (_, entry) in checkpoint.tensors.items() if entry is error.entry)
            raise WeightsError(
                f"the weights in {folder} are broken: {name} holds NaN or infinity as {targets[name].dtype}", "model"
            ) from None
        for name, of in twins.items():
            if not torch.equal(targets[name], targets[of]):
                raise WeightsError(
                    f"{folder}: config.json says tie_word_embeddings, but {name} is stored and differs from {of}; "
                    'hf_overrides={"tie_word_embeddings": false} uses what is stored',
                    "model",
                )


def fill_randomly(model: Model, seed: int) -> None:
    """Uniform values that keep activations near unit size through any depth; norms are 1. Same seed, same weights."""
    generator: torch.Generator | None = None
    for name, parameter in model.named_parameters():
        if generator is None:
            generator = torch.Generator(parameter.device).manual_seed(seed)
        if parameter.dim() >= 2:
            bound = (3 / parameter.shape[-1]) ** 0.5
            parameter.data.uniform_(-bound, bound, generator=generator)
        elif name.endswith("bias"):
            parameter.data.uniform_(-0.02, 0.02, generator=generator)
        else:
            parameter.data.fill_(1)


def parameter_targets(model: Model) -> dict[str, torch.Tensor]:
    """Checkpoint tensor → the memory it fills: a parameter, or the rows of one that several tensors share."""
    targets: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        for name, parameter in module.named_parameters(recurse=False):
            start = 0
            for part, rows in (getattr(module, "parts", None) or {"": len(parameter)}).items():
                source = f"{parent}.{part}" if part else path
                targets[model.checkpoint_name(f"{source}.{name}")] = parameter.data[start : start + rows]
                start += rows
    return targets


# -- the checkpoint ---------------------------------------------------------------------------------------------


@dataclass
class _Problems:
    """What is wrong with a checkpoint, by kind."""

    lines: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def raise_if_any(self, folder: Path) -> None:
        if not self.lines:
            return
        text = [f"the weights in {folder} do not fit the model:"]
        for kind, lines in self.lines.items():
            folded = _fold_layers(lines)
            text.append(f"  {len(lines)} {kind}:")
            text += [f"    {line}" for line in folded[:_SHOWN]]
            if len(folded) > _SHOWN:
                text.append(f"    … and {len(folded) - _SHOWN} more")
        raise WeightsError("\n".join(text), "model")


def _fold_layers(lines: list[str]) -> list[str]:
    """One line for what repeats in every layer."""
    groups: dict[str, list[str]] = defaultdict(list)
    for line in sorted(lines):
        groups[re.sub(r"\.\d+\.", ".*.", line, count=1)].append(line)
    return [same[0] if len(same) == 1 else f"{folded} ({len(same)} layers)" for folded, same in groups.items()]


class _Checkpoint:
    """The safetensors files of a folder, open, with every header checked."""

    def __init__(self, folder: Path, model: Model, wanted: Iterable[str], stack: ExitStack) -> None:
        self._folder = folder
        self._problems = _Problems()
        self.tensors: dict[str, tuple[SafetensorsFile, Entry]] = {}  # by the model's names, if it has use for them
        for name in self._file_names():
            self._open(name, model.known_name, stack)
        # Names with a folder stand for a checkpoint of their own in it.
        for part in sorted({name.rpartition("/")[0] for name in wanted if "/" in name}):
            self._open(f"{part}/model.safetensors", f"{part}/{{}}".format, stack)

    def _open(self, name: str, known_name: Callable[[str], str | None], stack: ExitStack) -> None:
        try:
            file = stack.enter_context(SafetensorsFile(self._folder / name))
        except FileNotFoundError:
            hint = f"which {INDEX} points to" if "/" not in name else "which modules.json points to"
            self._problems.lines["absent files"].append(f"{name}, {hint}")
        except (MalformedFileError, OSError) as error:
            self._problems.lines["unreadable files"].append(f"{name} {error}")
        else:
            for tensor, entry in file.entries.items():
                known = None if _NOT_PARAMETERS.search(tensor) else known_name(tensor)
                if known is not None:
                    self.tensors[known] = (file, entry)

    def _file_names(self) -> list[str]:
        if (self._folder / INDEX).exists():
            return _indexed_files(self._folder / INDEX)
        names = sorted(p.name for p in self._folder.glob("*.safetensors"))
        if "model.safetensors" in names:
            return ["model.safetensors"]
        if not names:
            others = [p.name for kind in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in self._folder.glob(kind)]
            hint = f"; {others[0]} is of a format that is not read" if others else ""
            raise WeightsError(f"{self._folder} holds no .safetensors file{hint}", "model")
        return names

    def check(self, targets: dict[str, torch.Tensor]) -> None:
        """Raises WeightsError unless the tensors are exactly those that `targets` names, in its shapes."""
        lines = self._problems.lines
        present = self.tensors.keys()
        if not lines:  # what an unreadable file would have held is not missing besides
            for name in targets.keys() - present:
                lines["missing tensors"].append(f"{name} {list(targets[name].shape)}")
        for name in present - targets.keys():
            lines["tensors that the model has no place for"].append(f"{name} {list(self.tensors[name][1].shape)}")
        for name in present & targets.keys():
            entry, target = self.tensors[name][1], targets[name]
            if entry.shape != tuple(target.shape):
                lines["tensors of another shape"].append(
                    f"{name} is {list(entry.shape)}, the model needs {list(target.shape)}"
                )
            elif entry.dtype not in FLOATS:
                lines["tensors of another type"].append(f"{name} is {entry.dtype}, the model needs floating point")
        self._problems.raise_if_any(self._folder)


def _indexed_files(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise WeightsError(f"{index} is not a safetensors index: a JSON object with a weight_map", "model") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(f"{index} points to {name!r}, which is no .safetensors file beside it", "model")
    return sorted(names)


# -- reading ----------------------------------------------------------------------------------------------------


def _read(checkpoint: _Checkpoint, targets: dict[str, torch.Tensor], stack: ExitStack, show_progress: bool) -> None:
    plan = [(*checkpoint.tensors[name], target) for name, target in targets.items()]
    plan.sort(key=lambda item: (id(item[0]), item[1].start))  # as it lies on disk
    total = sum(entry.num_bytes for _, entry, _ in plan)
    for _ in _with_progress(transfer(plan, next(iter(targets.values())).device), total, show_progress, stack):
        pass


def _with_progress(counts: Iterator[int], total: int, show: bool, stack: ExitStack) -> Iterator[int]:
    """The same byte counts, shown as a bar on the way."""
    if not show or not sys.stderr.isatty():
        yield from counts
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = bar.add_task("loading weights", total=total)
    for count in counts:
        yield count
        bar.advance(task, count)
