"""compressed-tensors (llm-compressor): groups of modules, each with a scheme of weights and one of activations."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.kernels.gemm.codes import Kind
from quire.quantization.base import (
    INPUTS,
    OUTPUTS,
    Axis,
    MatrixInfo,
    QuantizationMethod,
    Scheme,
    Source,
    Tensors,
    plain_scheme,
)
from quire.quantization.grouped import Grouped
from quire.quantization.int8_rows import Int8Rows
from quire.quantization.methods import floats
from quire.quantization.methods.bits import WORD, unpack
from quire.quantization.methods.gptq import centred, orders
from quire.quantization.methods.modules import (
    OPTION,
    check_multiples,
    cut_when_packed,
    is_part,
    names_of,
    of_all,
    one_of,
    refuse_unknown,
)

FORMATS = (
    "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
_ARGUMENTS = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder", "observer",
    "observer_kwargs", "scale_dtype", "zp_dtype",
)  # fmt: skip
_NVFP4 = {"weight": "weight_packed", "scale": "weight_scale", "factor": "weight_global_scale"}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Arguments(NamedTuple):
    """Of weights or activations. group 0: none."""

    bits: int
    kind: str  # int | float
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, ...]
    dynamic: bool
    actorder: str | None
    exponents: bool  # scales are powers of two

    @classmethod
    def read(cls, args: Any, what: str) -> Arguments | None:
        """Raises ConfigError for what cannot be."""
        if args is None:
            return None
        if not isinstance(args, dict):
            raise ConfigError(f"quantization_config: {what} must be an object, got {shown(args)}", OPTION)
        refuse_unknown(args, _ARGUMENTS, f"compressed-tensors {what} of")
        group, block = args.get("group_size"), args.get("block_structure")
        strategies = ("tensor", "channel", "group", "token", "block", "tensor_group")
        strategy = one_of(args, "strategy", strategies, "group" if group not in (None, -1) else "tensor")
        return cls(
            one_of(args, "num_bits", range(2, 9), 8), one_of(args, "type", ("int", "float"), "int"),
            one_of(args, "symmetric", (True, False), default=True), strategy,
            max(group, 0) if isinstance(group, int) else 0, tuple(block) if isinstance(block, list) else (),
            one_of(args, "dynamic", (True, False, "local"), default=False) is not False,
            one_of(args, "actorder", ("weight", "group", "static", "dynamic"), None) if args.get("actorder") else None,
            "uint8" in str(args.get("scale_dtype")),
        )  # fmt: skip


class Group(NamedTuple):
    name: str
    targets: list[str]
    weights: Arguments
    activations: Arguments | None
    layout: str


class CompressedTensors(QuantizationMethod):
    unused = rf"{floats.UNUSED}|\.(weight_shape|input_global_scale)$"

    def __init__(self, config: Mapping[str, Any]) -> None:
        known = (
            "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status", "global_compression_ratio",
            "sparsity_config", "transform_config", "version",
        )  # fmt: skip
        refuse_unknown(config, known, "compressed-tensors")
        _refuse_sparse(config.get("sparsity_config"))
        _refuse_transforms(config.get("transform_config"))
        one_of(config, "quantization_status", ("compressed", "frozen"), "compressed")
        self._ignored = names_of(config, "ignore")
        layout = one_of(config, "format", FORMATS, "dense")
        groups = config.get("config_groups") or {}
        if not isinstance(groups, dict):
            raise ConfigError(f"quantization_config: config_groups must be an object, got {shown(groups)}", OPTION)
        read = [_group(name, group, layout) for name, group in groups.items()]
        self._by_target = {target: group for group in read for target in group.targets}
        self._patterns = sorted(target for target in self._by_target if target.startswith("re:"))
        self._has_fixed_inputs = any(
            _is_int8_rows(group) and not group.activations.dynamic for group in read if group.activations
        )
        if self._has_fixed_inputs:  # then input_scale is one that a product needs
            self.unused = self.unused.replace("input_scale|", "", 1)

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> CompressedTensors:
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        group = of_all(info, self._group_of)
        if group is None:
            return plain_scheme(info.dtype)
        weights = group.weights
        if group.layout == "pack-quantized" and weights.kind == "int":
            return packed_integers(info, weights)
        if weights.kind == "int":
            return _int8_rows(info, group) if _is_int8_rows(group) else _integers(info, weights)
        if weights.bits == 4:
            check_multiples(info, inputs=16 if weights.strategy == "tensor_group" else 32)
            if weights.strategy == "tensor_group":
                return floats.nvfp4(info, _NVFP4, inverse=True)
            return floats.mxfp4("weight_packed", "weight_scale")
        return self._eight_bit_floats(info, weights)

    def _eight_bit_floats(self, info: MatrixInfo, weights: Arguments) -> Scheme:
        if weights.strategy == "group":
            check_multiples(info, inputs=32)
            return floats.micro_scaled()
        if weights.strategy == "block":
            return floats.per_block(info, weights.block[0], weights.block[1], "weight_scale")
        return floats.per_channel() if weights.strategy == "channel" else floats.per_tensor(info)

    def _group_of(self, module: str) -> Group | None:
        """By its name first, then by the first pattern in the order of the alphabet, then as one of all linear layers:
        as the library chooses that made the file."""
        if is_part(module, [name for name in self._ignored if name.startswith("re:")]) or module in self._ignored:
            return None
        pattern = next((target for target in self._patterns if is_part(module, [target])), "Linear")
        return self._by_target.get(module, self._by_target.get(pattern))


def _refuse_sparse(config: Any) -> None:
    """2:4 and other sparsity: whatever is not dense."""
    layout = config.get("format", "dense") if isinstance(config, dict) else "dense"
    if layout != "dense":
        structure = config.get("sparsity_structure")
        raise ConfigError(
            f"quantization_config: sparse weights are not supported: sparsity_config has format={shown(layout)}, "
            f"sparsity_structure={shown(structure)}",
            OPTION,
        )


def _refuse_transforms(config: Any) -> None:
    if isinstance(config, dict) and config.get("config_groups"):
        named = ", ".join(map(str, config["config_groups"]))
        raise ConfigError(f"quantization_config: transform_config is not supported: {named}", OPTION)


def _group(name: str, group: Any, layout: str) -> Group:
    """Raises ConfigError for a scheme that there is not."""
    if not isinstance(group, dict):
        raise ConfigError(f"quantization_config: config_groups.{name} must be an object, got {shown(group)}", OPTION)
    refuse_unknown(
        group,
        ("targets", "weights", "input_activations", "output_activations", "format"),
        f"compressed-tensors {name} of",
    )
    if group.get("output_activations"):
        raise ConfigError(f"quantization_config: {name}: output_activations are not supported", OPTION)
    targets = names_of(group, "targets")
    for target in targets:
        if re.fullmatch(r"[A-Z]\w*", target) and target != "Linear":
            raise ConfigError(f"quantization_config: {name}: quantized {target} is not supported", OPTION)
    weights = Arguments.read(group.get("weights"), f"{name}.weights")
    if weights is None:
        raise ConfigError(f"quantization_config: {name} has no weights: only activations are not supported", OPTION)
    own = one_of(group, "format", FORMATS, None if layout in ("dense", "mixed-precision") else layout)
    found = Group(
        name, targets, weights, Arguments.read(group.get("input_activations"), f"{name}.input_activations"), own
    )
    _check(found)
    return found


def _check(group: Group) -> None:
    name, _, weights, activations, layout = group
    why = ""
    is_packed = layout == "pack-quantized"
    if weights.dynamic:
        why = "weights that are quantized at run time"
    elif weights.kind == "int" and is_packed:
        if weights.strategy not in ("group", "channel"):
            why = f"packed integers of {weights.bits} bits by {weights.strategy}"
    elif weights.kind == "int":
        if weights.strategy not in ("tensor", "channel", "group") or weights.actorder in ("group", "dynamic"):
            why = f"integers by {weights.strategy}, actorder={weights.actorder}, as {layout}"
        elif activations and _is_int8_rows(group) and activations.dynamic and not activations.symmetric:
            why = "dynamic int8 activations with zeros"
    elif weights.bits == 4:
        if weights.strategy not in ("tensor_group", "group") or weights.group not in (16, 32):
            why = f"4-bit floats by {weights.strategy} of {weights.group}"
    elif weights.bits != 8 or (weights.strategy == "group" and not (weights.exponents and weights.group == 32)):
        why = f"{weights.bits}-bit floats by {weights.strategy} of {weights.group}"
    elif weights.strategy == "block" and len(weights.block) != 2:
        why = "blocks without a block_structure of two sizes"
    if why:
        raise ConfigError(f"quantization_config: {name}: {why} are not supported", OPTION)


def packed_integers(info: MatrixInfo, weights: Arguments) -> Scheme:
    """weight_packed, weight_scale, and weight_zero_point and weight_g_idx where there are such."""
    bits, group = weights.bits, weights.group if weights.strategy == "group" else info.columns
    sort = weights.actorder in ("group", "dynamic")
    each = WORD // math.gcd(WORD, bits)  # numbers that fill whole words
    words = each * bits // WORD
    check_multiples(info, inputs=math.lcm(group, each), outputs=1 if weights.symmetric else each)
    groups: Axis | int = Axis("inputs", group) if group < info.columns else 1
    sources = [
        Source("weight_packed", (OUTPUTS, Axis("inputs", each, words)), (torch.int32,), torch.int32),
        Source("weight_scale", (OUTPUTS, groups), FLOATS, info.dtype),
    ]
    if not weights.symmetric:
        lines = Axis("outputs", each, words)
        sources.append(Source("weight_zero_point", (lines, groups), (torch.int32,), torch.int32))
    if sort:
        sources.append(Source("weight_g_idx", (INPUTS,), (torch.int32, torch.int64), torch.int32))
    kind: Kind = "int4" if bits <= 4 else "int8"
    zero_dtype = None if weights.symmetric else torch.uint8 if bits <= 4 else torch.int8
    form = Grouped(kind, group if group < info.columns else 0, zero=zero_dtype, sorted_parts=info.parts if sort else ())

    def pack(read: Tensors) -> Tensors:
        numbers, zero, order = unpack(read["weight_packed"], bits), None, None
        if not weights.symmetric:
            zero = unpack(read["weight_zero_point"].t().contiguous(), bits).t().contiguous()
        if sort:
            index = read["weight_g_idx"].view(len(info.parts), -1).long()
            order = orders(index, group, info.modules)
            split = zip(numbers.split(info.parts), order, strict=True)
            numbers = torch.cat([part.index_select(1, one) for part, one in split])
        numbers, zero = centred(numbers, zero, bits)
        return form.packed(numbers, read["weight_scale"], zero, order=order)

    scheme = Scheme(form, tuple(sources), pack)
    return cut_when_packed(scheme, info) if sort else scheme


# -- bytes -----------------------------------------------------------------------------------------------------


def _is_int8_rows(group: Group) -> bool:
    """Whether its products are made in integers of 8 bits; else activations are multiplied as they are."""
    weights, activations = group.weights, group.activations
    plain = weights.kind == "int" and weights.symmetric and weights.strategy != "group"
    of_8_bits = activations is not None and activations.kind == "int" and weights.bits == activations.bits == 8
    return plain and of_8_bits and group.layout != "pack-quantized"


def _int8_sources(weights: Arguments) -> list[Source]:
    scale = (OUTPUTS, 1) if weights.strategy == "channel" else ()
    return [
        Source("weight", (OUTPUTS, INPUTS), (torch.int8,), torch.int8),
        Source("weight_scale", scale, FLOATS, torch.float32),
    ]


def _row_scale(info: MatrixInfo, scale: torch.Tensor) -> torch.Tensor:
    """[rows], of one an output or one a module."""
    flat = scale.flatten()
    return (
        flat if len(flat) == sum(info.parts) else flat.repeat_interleave(torch.tensor(info.parts, device=flat.device))
    )


def _integers(info: MatrixInfo, weights: Arguments) -> Scheme:
    """A byte each, whatever their bits."""
    group = weights.group if weights.strategy == "group" else 0
    check_multiples(info, inputs=group or 1)
    groups: Axis | int = Axis("inputs", group) if 0 < group < info.columns else 1
    axes: tuple[Axis | int, ...] = () if weights.strategy == "tensor" else (OUTPUTS, groups)
    is_small, has_zeros = weights.bits <= 4, not weights.symmetric
    zero_dtype = torch.uint8 if is_small else torch.int8
    form = Grouped(
        "int4" if is_small else "int8",
        group if group < info.columns else 0,
        scale=torch.float32,
        zero=zero_dtype if has_zeros else None,
    )
    sources = [
        Source("weight", (OUTPUTS, INPUTS), (torch.int8,), torch.int8),
        Source("weight_scale", axes, FLOATS, torch.float32),
    ]
    if has_zeros:
        sources.append(Source("weight_zero_point", axes, (torch.int8, torch.int32), torch.int8))

    def pack(read: Tensors) -> Tensors:
        scale, zero = read["weight_scale"], read.get("weight_zero_point")
        if weights.strategy == "tensor":
            scale = _row_scale(info, scale)[:, None]
            zero = None if zero is None else _row_scale(info, zero)[:, None]
        numbers = read["weight"]
        if is_small:
            numbers = (numbers + 8).view(torch.uint8)
            zero = None if zero is None else (zero + 8).view(torch.uint8)
        return form.packed(numbers, scale, zero)

    return Scheme(form, tuple(sources), pack)


def _int8_rows(info: MatrixInfo, group: Group) -> Scheme:
    assert group.activations is not None
    fixed, zero = not group.activations.dynamic, not group.activations.symmetric
    form, sources = Int8Rows(fixed=fixed, zero=zero), _int8_sources(group.weights)
    if fixed:
        sources.append(Source("input_scale", (), FLOATS, torch.float32))
    if zero:
        sources.append(Source("input_zero_point", (), (torch.int8, torch.int32, *FLOATS), torch.float32))

    def pack(read: Tensors) -> Tensors:
        scale = _row_scale(info, read["weight_scale"])
        x_scale, x_zero = _inputs(read["input_scale"], read.get("input_zero_point")) if fixed else (scale, scale)
        return form.packed(read["weight"], scale, x_scale, x_zero)

    return Scheme(form, tuple(sources), pack)


def _inputs(scale: torch.Tensor, zero: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale and zero [1] for parts that have their own for the same inputs: of the range that holds theirs."""
    scale = scale.view(-1)
    zero = torch.zeros_like(scale) if zero is None else zero.view(-1)
    if bool((scale == scale[0]).all() and (zero == zero[0]).all()):
        return scale[:1], zero[:1]
    low, high = ((-128 - zero) * scale).amin(), ((127 - zero) * scale).amax()
    if not bool(zero.any()):
        return scale.amax()[None], zero[:1]
    whole = (high - low) / 255
    return whole[None], (-128 - low / whole).round()[None]
