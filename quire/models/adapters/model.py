"""The layers of a model that LoRA adapters may change, and an adapter's factors found and checked for them by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from quire.config.peft import PARAM, WEIGHTS, PeftConfig
from quire.foundation.errors import WeightsError
from quire.foundation.log import get_logger
from quire.layers.embedding import Embedding
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.layers.low_rank import (
    ActiveRows,
    ExpertFactors,
    HostFactors,
    LowRank,
    LowRankEmbedding,
    LowRankExperts,
    RareLowRank,
)
from quire.layers.may_be_packed import MayBePacked
from quire.models.adapters import pack
from quire.models.adapters.tensors import (
    BASE,
    BASE_BIAS,
    Pair,
    Tensors,
    experts_pairs,
    pair_of,
    raise_if_any,
    read_tensors,
)
from quire.models.base import DecoderStack, Model
from quire.models.pooling import PoolingModel

_log = get_logger(__name__)
Host = HostFactors | ExpertFactors
HostAdapter = Mapping[int, Host]
"""An adapter's factors by layer, as `AdaptedModel` numbers them."""


class _Layer(NamedTuple):
    module: Linear | Embedding | Experts | MayBePacked
    low_rank: LowRank | LowRankEmbedding | LowRankExperts


class _Place(NamedTuple):
    """Of a checkpoint's module: a layer by number, the parts of it that the module is, and of which expert."""

    layer: int
    parts: tuple[int, ...] = (0,)
    expert: int = -1
    is_apart: bool = False  # one part, of what files have as one


def _is_read(model: Model) -> bool:
    """Whether tokens become vectors here: of several stages the first does it; the last may have the table as its
    head."""
    return not isinstance(model, DecoderStack) or model.stage.is_first


class ReadAdapter(NamedTuple):
    """What of an adapter needs nobody but its files: those of its modules' tensors that bring the base, and the factors
    by layer, packed unless what they are packed with is the model's own."""

    file: Path
    bases: Mapping[str, Tensors]
    pairs: Mapping[int, Mapping[tuple[int, int], Pair]]
    packed: Mapping[int, Host]


class AdaptedModel:
    """Makes room in a model's layers for as many adapters as there are slots.

    wanted: names, or ends of names, of modules that adapters may change; empty: all.
    """

    def __init__(
        self, model: Model, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device, wanted: list[str]
    ) -> None:
        self.active = ActiveRows(num_slots)
        self._model, self._rank, self._dtype, self._device, self._wanted = model, rank, dtype, device, wanted
        self._layers: list[_Layer] = []
        self._places: dict[str, _Place] = {}
        with torch.device(device):
            for path, module in model.named_modules():
                self._attach(path, module)
        is_whole = not isinstance(model, DecoderStack) or (model.stage.is_first and model.stage.is_last)
        if not self._places and is_whole:
            which = f"modules called {', '.join(wanted)}" if wanted else "modules"
            raise WeightsError(
                f"the model has no {which} that take adapters", "lora_target_modules" if wanted else "enable_lora"
            )

    def num_bytes(self) -> int:
        """That the slots take; experts' take theirs when they are used."""
        return sum(layer.low_rank.num_bytes() for layer in self._layers)

    def is_rare(self, adapter: HostAdapter) -> bool:
        """Whether it changes what few do, see `ActiveRows`."""
        return any(isinstance(self._layers[number].low_rank, RareLowRank | LowRankExperts) for number in adapter)

    def put(self, slot: int, adapter: HostAdapter | None) -> None:
        """An adapter takes a slot, on the current stream. None: one that changes nothing."""
        for number, layer in enumerate(self._layers):
            layer.low_rank.put(slot, None if adapter is None else adapter.get(number))  # type: ignore[arg-type]

    # -- room ---------------------------------------------------------------------------------------------------

    def _attach(self, path: str, module: nn.Module) -> None:
        if isinstance(module, Linear):
            reads_head = module.role == "vocabulary" and not isinstance(self._model, DecoderStack)  # rows of it
            if module.takes_adapters and not reads_head:
                self._attach_linear(module)
        elif isinstance(module, Experts):
            self._attach_experts(module)
        elif isinstance(module, MayBePacked):
            self._attach_whole(path, module)
        elif isinstance(module, Embedding) and path.rpartition(".")[2] == "embed_tokens":
            self._attach_embedding(path, module)

    def _attach_linear(self, linear: Linear) -> None:
        names = linear.modules_in_checkpoint
        if not any(map(self._is_wanted, names)):
            return
        rooms, columns = [share.room for share in linear.shares], linear.local_shape[1]
        kind = RareLowRank if linear.is_read else LowRank
        linear.low_rank = kind(rooms, columns, self._rank, self._dtype, self.active)
        number = self._add(linear, linear.low_rank)
        for name in filter(self._is_wanted, dict.fromkeys(names)):
            self._places[name] = _Place(number, tuple(i for i, other in enumerate(names) if other == name))
        if len(linear.parts) > 1 and len(set(names)) == 1:  # transformers may have taken apart what files have as one
            for i, part in enumerate(linear.parts):
                self._places.setdefault(f"{names[0].rpartition('.')[0]}.{part}", _Place(number, (i,), is_apart=True))

    def _attach_experts(self, experts: Experts) -> None:
        parts = [part for one in experts.pair for part in one.parts]
        if not any(map(self._is_wanted, [experts.name, *(f"{experts.name}.0.{part}" for part in parts)])):
            return
        experts.low_rank = LowRankExperts(experts.experts, self._device, self.active)
        number = self._add(experts, experts.low_rank)
        self._places[experts.name] = _Place(number)
        for expert in range(experts.experts):
            for place, part in enumerate(parts):
                self._places[f"{experts.name}.{expert}.{part}"] = _Place(number, (place,), expert)

    def _attach_whole(self, path: str, module: MayBePacked) -> None:
        rows, columns = module.weight.shape
        name = self._model.checkpoint_name(f"{path}.weight").removesuffix(".weight")
        if self._is_wanted(name):
            module.low_rank = RareLowRank([rows], columns, self._rank, self._dtype, self.active)
            self._places[name] = _Place(self._add(module, module.low_rank))

    def _attach_embedding(self, path: str, embedding: Embedding) -> None:
        """And the head that it may be."""
        (vocab, hidden), model = embedding.weight.shape, self._model
        name = model.checkpoint_name(f"{path}.weight")
        inner = name.removesuffix(".weight")
        if self._is_wanted(inner) and not model.is_elsewhere(name) and _is_read(model):
            embedding.low_rank = LowRankEmbedding(vocab, hidden, self._rank, self._dtype, self.active)
            self._places[inner] = _Place(self._add(embedding, embedding.low_rank))
        head = next((twin.removesuffix(".weight") for twin, of in model.twins.items() if of == name), "")
        if head and self._is_wanted(head):
            begin, end, _ = embedding.share
            embedding.head_low_rank = LowRank([end - begin], hidden, self._rank, self._dtype, self.active)
            self._places[head] = _Place(self._add(embedding, embedding.head_low_rank))

    def _is_wanted(self, name: str) -> bool:
        return not self._wanted or any(name == one or name.endswith(f".{one}") for one in self._wanted)

    def _add(self, module: Any, low_rank: Any) -> int:
        self._layers.append(_Layer(module, low_rank))
        return len(self._layers) - 1

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self, folder: Path, max_rank: int) -> dict[int, Host]:
        """An adapter's factors. Raises ConfigError, or WeightsError saying all that does not fit.

        Ranks that share the model must all read the same adapter: what DoRA needs of a line they add up.
        """
        return self.finish(self.begin(folder, max_rank))

    def begin(self, folder: Path, max_rank: int) -> ReadAdapter:
        """What takes long of it, and may be done on a thread of its own while the model computes: neither the model's
        numbers nor other ranks are asked. Raises as `read`."""
        config, file = PeftConfig.read(folder, max_rank), folder / WEIGHTS
        tensors = read_tensors(file)
        left_out = {module for module in tensors if self._is_left_out(module)}
        if left_out and len(left_out) == len(tensors):
            raise WeightsError(f"{file} adapts nothing but parts that see or hear, which do not run here", PARAM)
        if left_out:
            _log.info("%d modules of %s are of parts that see or hear, and are left out", len(left_out), folder)
        elsewhere = left_out | {module for module in tensors if self._is_elsewhere(module)}
        tensors = {module: own for module, own in tensors.items() if module not in elsewhere}
        known = {module: self._known_name(module) for module in tensors}
        raise_if_any(file, [*self._strangers(config, known, elsewhere), *self._absent(config, set(known.values()))])
        found: dict[int, dict[tuple[int, int], Pair]] = defaultdict(dict)
        problems = []
        for module, own in tensors.items():
            place = self._places[known[module] or ""]
            try:
                found[place.layer].update(self._pairs(config, module, own, place))
            except WeightsError as error:
                problems.append(str(error))
        raise_if_any(file, problems)
        bases = {module: own for module, own in tensors.items() if BASE in own or BASE_BIAS in own}
        if config.use_dora:
            return ReadAdapter(file, bases, dict(sorted(found.items())), {})
        with torch.inference_mode():
            packed = {number: self._packed(number, pairs) for number, pairs in sorted(found.items())}
        return ReadAdapter(file, bases, {}, packed)

    def finish(self, read: ReadAdapter) -> dict[int, Host]:
        """The rest, between two steps. Raises WeightsError for a base that is not the model's."""
        problems = []
        for module, own in read.bases.items():
            try:
                self._check_base(module, own, self._layers[self._places[self._known_name(module) or ""].layer])
            except WeightsError as error:
                problems.append(str(error))
        raise_if_any(read.file, problems)
        with torch.inference_mode():
            return {**read.packed, **{number: self._packed(number, pairs) for number, pairs in read.pairs.items()}}

    def _is_left_out(self, module: str) -> bool:
        """Whether it is of what a model has beside its decoder, whose own tensors are not read either."""
        trunk = self._model.trunk if isinstance(self._model, PoolingModel) else self._model
        is_wrapped = isinstance(trunk, DecoderStack) and trunk.files_names is not None
        return is_wrapped and self._model.file_name(f"{module}.weight") is None

    def _is_elsewhere(self, module: str) -> bool:
        """Whether it is another stage's."""
        module = module.removesuffix(f".{BASE}")
        if module in self._places:
            return False
        tensor = f"{module}.weight"
        name = self._model.known_name(self._model.file_name(tensor) or tensor)
        if name is not None and self._model.is_elsewhere(name):
            return True
        return not _is_read(self._model) and name == self._model.checkpoint_name("embed_tokens.weight")

    def _known_name(self, module: str) -> str | None:
        """What our places call it; None: it has none."""
        module = module.removesuffix(f".{BASE}")  # around parameters that are adapted one after the other
        if module in self._places:
            return module
        tensor = f"{module}.weight"  # as older files call it, or a whole model of which this is the decoder, or we do
        ours = tensor.removeprefix("model.")
        path = f"trunk.{ours}" if isinstance(self._model, PoolingModel) else ours
        whole = self._model.known_name(self._model.file_name(tensor) or tensor)
        names = (self._model.known_name(tensor) or "", whole or "", self._model.checkpoint_name(path))
        return next((name for one in names if (name := one.removesuffix(".weight")) in self._places), None)

    def _strangers(self, config: PeftConfig, known: Mapping[str, str | None], elsewhere: set[str]) -> Iterator[str]:
        """What the file or its config names and the model does not have. elsewhere: modules of other stages, and those
        that are left out."""
        for module, name in known.items():
            if name is None:
                yield f"{module} is no module of this model that takes adapters"
            elif isinstance(self._module(name), Experts) and self._places[name].expert < 0:
                if not config.parameters:
                    yield f"{module} is not among the config's target_parameters"
            elif not (config.selects(module) or config.has_parameter(f"{module}.weight")):
                yield f"{module} is not among the config's target_modules"
        names = [*self._places, *known, *elsewhere]
        if config.targets is not None and not isinstance(config.targets, str):
            for target in config.targets:
                if not any(name == target or name.endswith(f".{target}") for name in names):
                    yield f"target_modules has {target!r}, and the model has no such module that takes adapters"
        for parameter in config.parameters:
            if not elsewhere and not any(name.endswith(f".{parameter}") for name in self._parameters()):
                yield f"target_parameters has {parameter!r}, and the model has no such experts or router"

    def _parameters(self) -> Iterator[str]:
        yield from (f"{name}.weight" for name in self._places)
        for layer in self._layers:
            if isinstance(layer.module, Experts):
                names = layer.module.names
                yield from (f"{layer.module.name}.{part}" for part in (names.all_gate_up, names.all_down))

    def _absent(self, config: PeftConfig, known: set[str | None]) -> Iterator[str]:
        """Modules that the config chooses and the file lacks. Experts may be stored in another way than checkpoints,
        and routers are no linear layers to every version of transformers."""
        if config.targets is None:
            return
        for name in self._places.keys() - known:
            is_module = not (self._places[name].is_apart or isinstance(self._module(name), Experts | MayBePacked))
            if is_module and config.selects(name):
                yield f"{name} lacks lora_A and lora_B"

    def _module(self, name: str) -> nn.Module:
        return self._layers[self._places[name].layer].module

    def _check_base(self, module: str, tensors: Tensors, layer: _Layer) -> None:
        """A file may bring the matrix that was adapted, and its bias: they must be the model's own. Raises
        WeightsError."""
        own, base, bias = layer.module, tensors.get(BASE), tensors.get(BASE_BIAS)
        if base is None and bias is None:
            return
        if isinstance(own, Embedding) and bias is None and base is not None:
            is_same = base.shape == own.weight.shape and torch.equal(base.to(own.weight), own.weight)
        elif isinstance(own, Linear) and own.role == "vocabulary":
            is_same = all(
                theirs is None or (ours is not None and _is_same(own, theirs, ours))
                for theirs, ours in ((base, own.matrix.dense(own.dtype)), (bias, own.bias))
            )
        else:
            is_same = False
        if not is_same:
            raise WeightsError(f"{module} comes with a base layer that is not this model's", PARAM)

    def _pairs(
        self, config: PeftConfig, module: str, tensors: Tensors, place: _Place
    ) -> Iterator[tuple[tuple[int, int], Pair]]:
        """Factors by expert (-1: of none) and part."""
        layer, low_rank = self._layers[place.layer]
        if isinstance(layer, Experts):
            yield from _of_experts(layer, config, module, tensors, place)
        elif isinstance(layer, Embedding | MayBePacked):
            shape = layer.weight.shape
            outputs, inputs = shape if isinstance(low_rank, LowRank) else shape[::-1]
            yield (-1, 0), pair_of(config, module, tensors, outputs, inputs)
        elif place.is_apart:
            (part,) = place.parts
            yield (-1, part), pair_of(config, module, tensors, [*layer.parts.values()][part], layer.in_features)
        else:
            stored = layer.stored_parts
            pair = pair_of(config, module, tensors, stored[place.parts[0]].rows, layer.in_features)
            for part in place.parts:
                lines = torch.cat([torch.arange(*piece) for piece in stored[part].pieces])
                magnitude = None if pair.magnitude is None else pair.magnitude[lines]
                yield (-1, part), Pair(pair.down, pair.up[lines], magnitude)

    def _packed(self, number: int, pairs: Mapping[tuple[int, int], Pair]) -> Host:
        module, low_rank = self._layers[number]
        if isinstance(module, Experts):
            return pack.of_experts(module, pairs, self._dtype)
        if isinstance(module, Linear):
            return pack.of_linear(module, {part: pair for (_, part), pair in pairs.items()}, self._dtype)
        if isinstance(module, MayBePacked):
            return pack.of_whole(module.weight, pairs[-1, 0], self._dtype)
        make = pack.of_head if isinstance(low_rank, LowRank) else pack.of_embedding
        return make(module, pairs[-1, 0], self._dtype)


def _is_same(linear: Linear, whole: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether this rank's part of it, as it is kept here, is what the layer has."""
    if whole.shape != (linear.out_features, linear.in_features)[: whole.dim()]:
        return False
    lines = sum(share.end - share.begin for share in linear.shares)  # the last rank has room for more
    part = linear.cut(whole)[:lines].to(own)
    return torch.equal(linear.as_kept(part) if part.dim() > 1 else part, own[:lines])


def _of_experts(
    experts: Experts, config: PeftConfig, module: str, tensors: Tensors, place: _Place
) -> Iterator[tuple[tuple[int, int], Pair]]:
    opened, down = experts.pair
    inner, hidden, before = down.in_features, down.out_features, len(opened.parts)  # gate and up, or up alone
    if place.expert >= 0:
        if config.use_dora and experts.has_bias:
            raise WeightsError(f"{module}: use_dora is not supported for experts with biases", PARAM)
        part = place.parts[0]
        outputs, inputs = (hidden, inner) if part == before else (inner, hidden)
        yield (place.expert, part), pair_of(config, module, tensors, outputs, inputs)
        return
    is_down = "lora_A" in tensors and tensors["lora_A"].shape[1] == inner and len(tensors.get("lora_B", ())) == hidden
    name = experts.names.all_down if is_down else experts.names.all_gate_up
    outputs, inputs = (hidden, inner) if is_down else (before * inner, hidden)
    lines = [slice(part * inner, (part + 1) * inner) for part in range(before)]
    if experts.names.interleaved:
        lines = [slice(part, None, before) for part in range(before)]
    path = f"{module.removesuffix(f'.{BASE}')}.{name}"
    for expert, pair in enumerate(experts_pairs(config, path, tensors, experts.experts, outputs, inputs)):
        if is_down:
            yield (expert, before), pair
        else:
            yield from (((expert, part), Pair(pair.down, pair.up[own], None)) for part, own in enumerate(lines))
