"""Weights into a built model: from a checkpoint, checked as a whole before a byte is read, or random ones.

The model's layers say what of a checkpoint goes where (`layers/targets.py`); nothing else knows its layout.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from quire.foundation.errors import WeightsError
from quire.foundation.log import get_logger
from quire.layers.cuts import cut_of, own_targets
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.layers.may_be_packed import MayBePacked
from quire.layers.targets import HasForms, HasStored, HasTargets, Target
from quire.models.base import Model
from quire.models.checkpoint_files import file_names, layout_of
from quire.models.gguf_file import GgufFile
from quire.models.safetensors_file import Entry, MalformedFileError, SafetensorsFile, TensorFile
from quire.models.spelling import Spelling, spelling_of
from quire.models.torch_files import TorchFiles
from quire.models.transfer import NotFiniteError, Read, transfer
from quire.quantization.base import FLOATS

_NOT_PARAMETERS = r"\.rotary_emb\.inv_freq$"  # tables that old checkpoints carry; we compute them
_log = get_logger(__name__)
_SHOWN = 20  # lines of one kind in an error


def load(
    model: Model,
    folder: Path,
    load_format: str,
    show_progress: bool = False,
    seed: int = 0,
    unused: str | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Set every parameter of `model`.

    load_format: "auto" and "safetensors" read the checkpoint in `folder`, "mistral" and "pt" one of other files
    (`models/checkpoint_files.py`), "dummy" draws random weights from `seed`.
    show_progress: a bar on the terminal, if there is one. unused: a pattern of names of tensors that nobody needs.
    renamed: ends of names that stand for others.
    Raises WeightsError listing all that is missing, left over, misshapen or unreadable, and for tensors that hold NaN
    or infinities, or that the config says are one and the same and are not.
    """
    if load_format == "dummy":
        fill_randomly(model, seed)
        return
    with ExitStack() as stack:
        checkpoint = _Checkpoint(folder, model, stack, load_format, unused, renamed)
        targets = parameter_targets(model, checkpoint.shapes())
        checkpoint.open_parts([target.source for target in targets], stack)
        checkpoint.untwin(model.twins)
        twins = _twins(model, targets, checkpoint.tensors.keys())
        targets += twins
        checkpoint.check(targets)
        if checkpoint.fixed_inputs:
            _log.info(
                "%d fixed scales of activations (input_scale) are not used: rows are rounded by scales of their own, "
                "if at all",
                checkpoint.fixed_inputs,
            )
        try:
            _read(checkpoint, targets, stack, show_progress)
        except (MalformedFileError, OSError) as error:
            raise WeightsError(f"the weights in {folder} could not be read: {error}", "model") from error
        except NotFiniteError as error:
            name = error.source
            dtype = next(target.memory().dtype for target in targets if target.source == name)
            raise WeightsError(
                f"the weights in {folder} are broken: {name} holds NaN or infinity as {dtype}", "model"
            ) from None
        by_name = {target.source: target for target in targets}
        for twin in twins:
            of = model.twins[twin.source]
            if not torch.equal(twin.memory(), by_name[of].memory()):
                raise WeightsError(
                    f"{folder}: config.json says tie_word_embeddings, but {twin.source} is stored and differs from "
                    f'{of}; hf_overrides={{"tie_word_embeddings": false}} uses what is stored',
                    "model",
                )


def _twins(model: Model, targets: list[Target], present: Container[str]) -> list[Target]:
    """Places for tensors that are stored although they must equal another one."""
    by_name = {target.source: target for target in targets}
    return [
        Target(name, by_name[of].shape, torch.empty_like(by_name[of].memory()))
        for name, of in model.twins.items()
        if name in present
    ]


def fill_randomly(model: Model, seed: int) -> None:
    """Uniform values that keep activations near unit size through any depth; norms are 1.

    Same seed, same weights; a quantized model is made of those that it would have in floating point, and ranks cut
    theirs out of those that one would have.
    """
    device = next(parameter.device for _, parameter in model.named_parameters())
    generator = torch.Generator(device)
    kinds = [m.dtype for _, m in model.named_modules() if isinstance(m, Linear)]
    dtype = kinds[0] if kinds else torch.get_default_dtype()
    for path, module in model.named_modules():
        generator.manual_seed(zlib.crc32(path.encode(), seed & 0xFFFFFFFF))  # whatever other stages have before it
        if isinstance(module, Experts):
            module.fill(lambda *shape: _draw(torch.empty(shape, dtype=dtype, device=device), generator))
            continue
        matrix = isinstance(module, Linear)
        if isinstance(module, Linear):
            dense = torch.empty(module.out_features, module.in_features, dtype=module.dtype, device=device)
            module.set_dense(module.cut(_draw(dense, generator)))
        for name, parameter in module.named_parameters(recurse=False):
            if matrix and name != "bias":
                continue
            if parameter.dim() >= 2:
                _draw_share(module, name, parameter.data, generator)
            elif name == "bias":
                cut = cut_of(module, name)
                lines = module.out_features if isinstance(module, Linear) else cut.total if cut else len(parameter)
                whole = parameter.new_empty(lines).uniform_(-0.02, 0.02, generator=generator)
                whole = module.cut(whole) if isinstance(module, Linear) else cut.part(whole) if cut else whole
                parameter.data.copy_(whole)
            else:
                parameter.data.fill_(1)


def _draw_share(module: nn.Module, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """What this rank has of a layer's own parameter."""
    cut = cut_of(module, name)
    if cut is None:
        _draw(tensor, generator)
    else:
        tensor.copy_(cut.part(_draw(tensor.new_empty((cut.total, *tensor.shape[1:])), generator)))


def _draw(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    bound = (3 / tensor.shape[-1]) ** 0.5
    return tensor.uniform_(-bound, bound, generator=generator)


def parameter_targets(model: Model, stored: Mapping[str, tuple[int, ...]] = MappingProxyType({})) -> list[Target]:
    """All that the model wants of a checkpoint, by the checkpoint's names. stored: the shapes of what it has."""
    targets: list[Target] = []
    told: list[str] = []  # beginnings of the paths of those whose parents have spoken for them
    for path, module in model.named_modules():
        if path.startswith(tuple(told)):
            continue
        if isinstance(module, HasTargets | HasForms):
            told.append(f"{path}." if path else "")
        if isinstance(module, HasTargets):
            targets += module.targets()
            continue
        if isinstance(module, HasForms):
            targets += module.targets_in(stored)
            continue
        if isinstance(module, HasStored):
            targets += module.stored(model.checkpoint_name(f"{path}.weight").removesuffix(".weight"))
            continue
        is_packed = isinstance(module, MayBePacked) and module.is_packed
        if isinstance(module, MayBePacked) and is_packed:
            targets += module.packed_targets()
        for name, _ in module.named_parameters(recurse=False):
            if not is_packed or name != "weight":
                targets += own_targets(module, name, model.checkpoint_name(f"{path}.{name}"))
    return [target for target in targets if not model.is_elsewhere(target.source)]


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


def _known_name(model: Model, spelled: Spelling, tensor: str) -> str | None:
    name = model.file_name(tensor)
    known = None if name is None else model.known_name(spelled(name))
    return None if known is None or model.is_elsewhere(known) else known


class _Checkpoint:
    """The files of a folder that hold tensors, open, with every header checked."""

    def __init__(
        self,
        folder: Path,
        model: Model,
        stack: ExitStack,
        load_format: str,
        unused: str | None = None,
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._folder, self._renamed = folder, renamed
        self._unused = re.compile(f"{_NOT_PARAMETERS}|{unused}" if unused else _NOT_PARAMETERS)
        self._problems = _Problems()
        self.tensors: dict[str, tuple[TensorFile, Entry]] = {}  # by the model's names, if it has use for them
        self.fixed_inputs = 0
        layout = layout_of(folder, load_format)
        names = file_names(folder, layout)
        opener: Callable[[Path], TensorFile] = SafetensorsFile
        if layout == "pt":
            opener = stack.enter_context(TorchFiles()).open
        elif layout == "gguf":
            opener = partial(GgufFile, first=folder / names[0])
        opened = [file for name in names if (file := self._opened(name, stack, opener)) is not None]
        every = (model.file_name(self._usual(tensor)) for file in opened for tensor in file.entries)
        spelled = spelling_of(model, filter(None, every))
        if told := spelled.described():
            _log.info("names of tensors in %s %s, and are read without that", folder, told)
        for file in opened:
            self._take(file, partial(_known_name, model, spelled))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, (_, entry) in self.tensors.items()}

    def open_parts(self, wanted: Iterable[str], stack: ExitStack) -> None:
        """Names with a folder stand for a checkpoint of their own in it."""
        for part in sorted({name.rpartition("/")[0] for name in wanted if "/" in name}):
            file = self._opened(f"{part}/model.safetensors", stack, SafetensorsFile)
            if file is not None:
                self._take(file, f"{part}/{{}}".format)

    def untwin(self, twins: Mapping[str, str]) -> None:
        """What is stored once, under the other of its two names, gets the one that the model asks for: safetensors'
        `save_model` keeps that which comes first in the alphabet."""
        for twin, name in twins.items():
            if name not in self.tensors and twin in self.tensors:
                self.tensors[name] = self.tensors.pop(twin)

    def _opened(self, name: str, stack: ExitStack, opener: Callable[[Path], TensorFile]) -> TensorFile | None:
        """None: it cannot be."""
        try:
            return stack.enter_context(opener(self._folder / name))
        except FileNotFoundError:
            hint = "which the index points to" if "/" not in name else "which modules.json points to"
            self._problems.lines["absent files"].append(f"{name}, {hint}")
        except (MalformedFileError, OSError) as error:
            self._problems.lines["unreadable files"].append(f"{name} {error}")
        return None

    def _take(self, file: TensorFile, known_name: Callable[[str], str | None]) -> None:
        for tensor, entry in file.entries.items():
            self.fixed_inputs += tensor.endswith(".input_scale") and self._unused.search(tensor) is not None
            known = None if self._unused.search(tensor) else known_name(self._usual(tensor))
            if known is not None:
                self.tensors[known] = (file, entry)

    def _usual(self, tensor: str) -> str:
        """What the model calls it."""
        module, dot, end = tensor.rpartition(".")
        return f"{module}{dot}{self._renamed.get(end, end)}"

    def check(self, targets: Iterable[Target]) -> None:
        """Raises WeightsError unless the tensors are exactly those that `targets` name, in their shapes and types."""
        lines = self._problems.lines
        wanted = {target.source: target for target in targets}
        present = self.tensors.keys()
        if not lines:  # what an unreadable file would have held is not missing besides
            for name in {name for name in wanted.keys() - present if not wanted[name].is_optional}:
                lines["missing tensors"].append(f"{name} {list(wanted[name].shape)}")
        for name in present - wanted.keys():
            if self._adds_nothing(name):
                continue
            lines["tensors that the model has no place for"].append(f"{name} {list(self.tensors[name][1].shape)}")
        for name in present & wanted.keys():
            entry, target = self.tensors[name][1], wanted[name]
            if not target.fits(entry.shape):
                lines["tensors of another shape"].append(
                    f"{name} is {list(entry.shape)}, the model needs {list(target.shape)}"
                )
            elif entry.dtype not in target.dtypes:
                needs = "floating point" if target.dtypes == FLOATS else " or ".join(map(str, target.dtypes))
                lines["tensors of another type"].append(f"{name} is {entry.dtype}, the model needs {needs}")
        self._problems.raise_if_any(self._folder)

    def _adds_nothing(self, name: str) -> bool:
        """Whether it is a bias of zeros alone, as AutoGPTQ gives layers that have none."""
        file, entry = self.tensors[name]
        if not name.endswith(".bias") or len(entry.shape) != 1 or entry.dtype not in FLOATS:
            return False
        values = torch.empty(entry.shape, dtype=entry.dtype)
        try:
            file.read_into(values.view(torch.uint8).numpy().data, entry.start)
        except (MalformedFileError, OSError):
            return False
        return not bool(values.any())


# -- reading ----------------------------------------------------------------------------------------------------


def _read(checkpoint: _Checkpoint, targets: list[Target], stack: ExitStack, show_progress: bool) -> None:
    """As it lies on disk; but what is packed together is read together, since it is staged until then."""
    plan = []
    for target in targets:
        if target.source in checkpoint.tensors and not target.is_elsewhere:
            file, entry = checkpoint.tensors[target.source]
            cut = target.cut_to(entry.shape)
            plan.append(Read(file, replace(entry, shape=cut.shape), cut))
    plan.sort(key=_place)
    groups: dict[int, list[Read]] = defaultdict(list)
    for read in plan:
        into = read.target.into
        groups[id(read if isinstance(into, torch.Tensor) else into.staging)].append(read)
    ordered = [read for group in groups.values() for read in group]
    total = sum(read.num_bytes() for read in ordered)
    device = next(
        target.memory().device
        for target in targets
        if isinstance(target.into, torch.Tensor) and not target.is_elsewhere
    )
    for _ in _with_progress(transfer(ordered, device), total, show_progress, stack):
        pass


def _place(read: Read) -> tuple[int, int]:
    return id(read.file), read.entry.start


def _with_progress(counts: Iterator[int], total: int, show: bool, stack: ExitStack) -> Iterator[int]:
    """The same byte counts, shown as a bar on the way."""
    if not show or not sys.stderr.isatty():
        yield from counts
        return
    from rich.console import Console  # 50 modules, for who wants to see it
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

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
