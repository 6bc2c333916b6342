"""From an architecture's name to the file that builds it (which `config/families.py` finds), and to a model."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from quire.config.families import family_of, own_family
from quire.config.files import mistral_format, wrappers
from quire.config.model_info import ModelInfo
from quire.config.pooler import PoolerConfig
from quire.distributed.group import Group
from quire.distributed.topology import ALONE
from quire.foundation.errors import ConfigError
from quire.layers.cuts import Joining, Shared
from quire.layers.experts import Experts
from quire.layers.head_terms import HeadTerms
from quire.layers.linear import Linear
from quire.layers.may_be_packed import MayBePacked
from quire.layers.norm import HeadNorms
from quire.models.base import Decoder, DecoderStack, Model
from quire.models.fallback.build import build_fallback
from quire.models.pooling import PoolingModel, make_heads
from quire.models.stored_kinds import StoredKinds, stored_kinds
from quire.quantization.base import MatrixInfo, QuantizationMethod, Scheme, UnlikeError, plain_scheme
from quire.quantization.plain import Plain
from quire.quantization.select import make_method
from quire.types.stages import split


class Place(NamedTuple):
    """Which of the model's stages is built. layers: that each stage has; none: see `split`."""

    number: int = 0
    stages: int = 1
    layers: Sequence[int] = ()


ONE_STAGE = Place()
_TOO_LARGE = re.compile("allocate|overflow")
_AS_TOLD = StoredKinds()
_LEFT_OUT = (  # settings that name modules which are not quantized
    "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules", "skip_modules",
)  # fmt: skip


def build(
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    method: QuantizationMethod | None = None,
    group: Group | None = None,
    place: Place = ONE_STAGE,
) -> Decoder:
    """The model with its parameters allocated on `device`, their values not set. method: None, the checkpoint's own.
    group: of the ranks that share it, each of which gets its own part; None: there is one. place: of its stage.

    Raises ConfigError for an architecture without a family file, a quantized checkpoint or a config that cannot be.
    """
    if info.impl:
        with _allocating(dtype, device):
            return build_fallback(info, dtype, device, max_positions)
    with _allocating(dtype, device):
        family = _family(info)
        model = family.build(_config(info, family), max_positions)
        if isinstance(model, DecoderStack) and model.is_causal:
            _name_files(model, info)
            if place.stages > 1:
                stages = split(len(model.layers), place.stages, place.layers, model.head_in_layers())
                model.keep(stages, place.number)
            allocate(model, method or _own_method(info), group, _stored_kinds(info, model), info.quantization)
    if not isinstance(model, DecoderStack) or not model.is_causal:
        raise ConfigError(f"{info.architecture} does not generate: set runner to auto or pooling", "runner")
    return model.eval()


def build_for_pooling(
    info: ModelInfo,
    pooler: PoolerConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    method: QuantizationMethod | None = None,
    group: Group | None = None,
) -> PoolingModel:
    """The same for a model that makes vectors."""
    family = _family(info)
    config = _config(info, family)
    if pooler.label_tokens is None and not pooler.returned_tokens and not pooler.lexical:  # no logits are wanted
        config = {**config, "tie_word_embeddings": True}
    with _allocating(dtype, device):
        trunk = family.build(config, max_positions)
        if info.sees_both_ways and trunk.is_causal:
            trunk.look_both_ways(max_positions)
        _name_files(trunk, info)
        heads = make_heads(pooler, info.architecture, config, family, trunk)
        model = PoolingModel(trunk, heads, pooler, getattr(family, "unused", None))
        allocate(model, method or _own_method(info), group, _stored_kinds(info, model))
    return model.eval()


def _own_method(info: ModelInfo) -> QuantizationMethod:
    return make_method(info.quantization.get("quant_method"), info.quantization)


def _stored_kinds(info: ModelInfo, model: Model) -> StoredKinds:
    """Of a checkpoint that is quantized."""
    if not info.quantization:
        return StoredKinds()
    return stored_kinds(Path(info.path), model, is_mistral=info.is_mistral)


def allocate(
    model: Model,
    method: QuantizationMethod,
    group: Group | None = None,
    stored: StoredKinds = _AS_TOLD,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Give every linear layer the tensors of its format, now that its place and so its name is known.

    group: every layer becomes the share of one of its ranks. stored: what files have goes before what the method says;
    settings: of the checkpoint that it was made by.
    """
    topology = ALONE if group is None else group.topology
    method = _AsStored(method, model, stored, settings)
    for layer in model.others_with_states if isinstance(model, DecoderStack) else ():
        layer.share_with(topology)
    for path, module in model.named_modules():
        if isinstance(module, Shared) and not isinstance(module, HeadTerms | HeadNorms):  # those attention tells
            module.share_with(topology)
        if isinstance(module, Joining) and group is not None:
            module.join(group)
        if isinstance(module, Experts):
            module.allocate(method, model.checkpoint_name(path), topology, group)
        if isinstance(module, MayBePacked):
            name = model.checkpoint_name(f"{path}.weight").removesuffix(".weight")
            if name in stored.packed:
                module.unpack_from(method, name)
        if isinstance(module, Linear):
            parent = path.rpartition(".")[0]
            paths = [f"{parent}.{part}" if part else path for part in module.sources]
            names = (model.checkpoint_name(f"{path}.weight").removesuffix(".weight") for path in paths)
            module.allocate(method, tuple(names), topology, group)
    if group is not None and isinstance(model, DecoderStack):
        model.norm_in_sums()


class _AsStored(QuantizationMethod):
    """A method that is told what files may call a model's modules besides, and is not asked of those that are plain in
    them; of those that are not, though its settings leave them out, it is asked as if they did not."""

    def __init__(
        self, method: QuantizationMethod, model: Model, stored: StoredKinds, settings: Mapping[str, Any]
    ) -> None:
        self._method, self._model, self._stored, self._unlisted = method, model, stored, method
        if any(settings.get(key) for key in _LEFT_OUT):
            rest = {key: value for key, value in settings.items() if key not in _LEFT_OUT}
            self._unlisted = make_method(rest.get("quant_method"), rest)

    def scheme(self, info: MatrixInfo) -> Scheme:
        are_plain = {module in self._stored.plain for module in info.modules}
        if are_plain == {True}:
            return plain_scheme(info.dtype)
        if are_plain == {True, False}:
            raise UnlikeError(f"{', '.join(info.modules)} are one matrix here, and some are stored plain", "model")
        others = {module: self._model.other_names(module) for module in info.modules}
        told = replace(info, spelled=others)
        found = self._method.scheme(told)
        is_left_out = found.pack is None and isinstance(found.format, Plain)
        if is_left_out and self._stored.packed.issuperset(info.modules):
            return self._unlisted.scheme(told)
        return found


def _name_files(model: DecoderStack, info: ModelInfo) -> None:
    """Tell a decoder what the files call its tensors, if they are not its own."""
    if info.is_mistral:
        model.file_name = mistral_format.decoders_name
    elif info.wrapper:
        model.file_name, model.files_names = wrappers.decoders_name, wrappers.files_names


def _config(info: ModelInfo, family: Any) -> dict[str, Any]:
    """With what a family of the user's own takes for missing keys; ours have been read before."""
    return {**getattr(family, "defaults", {}), **info.hf_config} if info.family else info.hf_config


def _family(info: ModelInfo) -> Any:
    if info.family:
        return own_family(info.family)
    return importlib.import_module(family_of(info.architecture).module)


@contextmanager
def _allocating(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not _TOO_LARGE.search(str(error)):
            raise
        raise ConfigError(f"config.json: a model of these sizes cannot be allocated: {error}", "model") from None
    finally:
        torch.set_default_dtype(before)
