"""AMD's Quark: floats and integers of 8 and 4 bits, for all modules, by pattern of their names, or by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from quire.config.reading import read_section
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.quantization.base import (
    FLOATS,
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
from quire.quantization.methods.awq import PLACES
from quire.quantization.methods.bits import unpack
from quire.quantization.methods.modules import (
    OPTION,
    check_multiples,
    is_part,
    names_of,
    of_all,
    one_of,
    refuse_unknown,
)

DTYPES = ("fp8_e4m3", "int8", "int4", "uint4", "fp4")
_TENSOR = (
    "dtype", "qscheme", "ch_axis", "group_size", "block_size", "symmetric", "is_dynamic", "scale_format", "scale_type",
    "round_method", "observer_cls", "scale_calculation_mode", "qat_spec", "mx_element_dtype", "zero_point_type",
    "is_scale_quant", "enable_compute_dtype", "max_input_numel", "enable_buffer_reuse",
)  # fmt: skip
_MODULE = ("weight", "input_tensors", "output_tensors", "bias", "target_device")
_KNOWN = (
    "global_quant_config", "layer_quant_config", "layer_type_quant_config", "exclude", "export", "algo_config",
    "quant_mode", "version", "kv_cache_quant_config", "kv_cache_post_rope", "log_severity_level",
    "pre_quant_opt_config", "pre_optimization", "min_kv_scale", "kv_cache_group",
)  # fmt: skip


class Spec(NamedTuple):
    """Of weights or activations. group 0: none."""

    dtype: str
    scheme: str
    group: int
    block: tuple[int, ...]
    symmetric: bool
    dynamic: bool
    exponents: bool  # scales are powers of two

    @classmethod
    def read(cls, config: Any, what: str) -> Spec | None:
        """Raises ConfigError for what cannot be."""
        if config is None:
            return None
        if not isinstance(config, dict):
            raise ConfigError(
                f"quantization_config: {what} of Quark must be an object, got {shown(config)}: scales that are "
                "quantized themselves are not supported",
                OPTION,
            )
        refuse_unknown(config, _TENSOR, f"Quark {what} of")
        schemes = ("per_tensor", "per_channel", "per_group", "per_block", "per_token")
        group, block = config.get("group_size"), config.get("block_size")
        return cls(
            str(config.get("dtype")),
            one_of(config, "qscheme", schemes, "per_tensor"),
            group if isinstance(group, int) else 0,
            tuple(block) if isinstance(block, list) else (),
            one_of(config, "symmetric", (True, False), default=True),
            one_of(config, "is_dynamic", (True, False), default=False),
            config.get("scale_format") == "e8m0",
        )


class Rule(NamedTuple):
    """Of a module; weights None: they are plain."""

    weights: Spec | None
    inputs: Spec | None

    @classmethod
    def read(cls, config: Any, name: str) -> Rule:
        if not isinstance(config, dict):
            raise ConfigError(f"quantization_config: {name} must be an object, got {shown(config)}", OPTION)
        refuse_unknown(config, _MODULE, f"Quark {name} of")
        if config.get("bias"):
            raise ConfigError(f"quantization_config: {name}: quantized biases are not supported", OPTION)
        return cls(Spec.read(config.get("weight"), "weight"), Spec.read(config.get("input_tensors"), "input_tensors"))


class Quark(QuantizationMethod):
    unused = rf"{floats.UNUSED}|\.(input|output)_(scale|zero_point)$"

    def __init__(self, config: Mapping[str, Any]) -> None:
        refuse_unknown(config, _KNOWN, "Quark")
        export = read_section(config, "export")
        one_of(export, "weight_format", ("real_quantized",), "real_quantized")
        self._reorders = one_of(export, "pack_method", ("reorder", "order"), "reorder") == "reorder"
        self._excluded = names_of(config, "exclude")
        self._all = Rule.read(config.get("global_quant_config") or {}, "global_quant_config")
        self._by_name = {
            name: Rule.read(rule, name) for name, rule in read_section(config, "layer_quant_config").items()
        }
        by_class = read_section(config, "layer_type_quant_config")
        if strange := [
            name for name in by_class if name not in ("Linear", "nn.Linear", "<class 'torch.nn.modules.linear.Linear'>")
        ]:
            raise ConfigError(f"quantization_config: layer_type_quant_config of {strange[0]} is not supported", OPTION)
        for name, rule in by_class.items():
            self._all = Rule.read(rule, name)

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> Quark:
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        rule = of_all(info, self._of_module)
        if rule is None or rule.weights is None:
            return plain_scheme(info.dtype)
        weights = rule.weights
        make = SCHEMES.get((weights.dtype, weights.scheme))
        if make is None or weights.dynamic:
            known = ", ".join(" ".join(kind) for kind in SCHEMES)
            raise ConfigError(
                f"quantization_config: Quark weights of dtype={weights.dtype}, qscheme={weights.scheme} are not "
                f"supported (known: {known})",
                OPTION,
            )
        return make(info, rule, self._reorders)

    def _of_module(self, module: str) -> Rule | None:
        if is_part(module, self._excluded):
            return None
        named = [rule for name, rule in self._by_name.items() if is_part(module, [name])]
        rule = named[0] if named else self._all
        if named and rule.weights is None and rule.inputs is None:  # of outputs alone: those of the cache
            return self._all
        return rule


def _fp8_tensor(info: MatrixInfo, rule: Rule, _: bool) -> Scheme:
    del rule
    return floats.per_tensor(info)


def _fp8_channel(info: MatrixInfo, rule: Rule, _: bool) -> Scheme:
    del info, rule
    return floats.per_channel(more=())


def _fp8_block(info: MatrixInfo, rule: Rule, _: bool) -> Scheme:
    assert rule.weights is not None
    if len(rule.weights.block) != 2:
        raise ConfigError(f"quantization_config: block_size must be two sizes, got {rule.weights.block}", OPTION)
    return floats.per_block(info, *rule.weights.block, "weight_scale")


def _fp4(info: MatrixInfo, rule: Rule, _: bool) -> Scheme:
    assert rule.weights is not None
    if rule.weights.group != 32 or not rule.weights.exponents:
        raise ConfigError("quantization_config: Quark's fp4 is supported with group_size=32, scale_format=e8m0", OPTION)
    check_multiples(info, inputs=32)
    return floats.mxfp4("weight", "weight_scale")


def _int8(info: MatrixInfo, rule: Rule, _: bool) -> Scheme:
    """A scale a tensor or an output; with integer activations it is multiplied in integers."""
    assert rule.weights is not None
    axes = (OUTPUTS,) if rule.weights.scheme == "per_channel" else ()
    if not rule.weights.symmetric:
        raise ConfigError("quantization_config: Quark's int8 weights with zeros are not supported", OPTION)
    inputs = rule.inputs
    rounds = inputs is not None and inputs.dtype == "int8"
    fixed = rounds and inputs is not None and not inputs.dynamic
    if rounds and inputs is not None and not inputs.symmetric:
        raise ConfigError("quantization_config: Quark's int8 activations with zeros are not supported", OPTION)
    sources = [
        Source("weight", (OUTPUTS, INPUTS), (torch.int8,), torch.int8),
        Source("weight_scale", axes, FLOATS, torch.float32),
        Source("weight_zero_point", axes, (torch.int8, torch.int32, *FLOATS), torch.float32, default=0),
    ]
    if fixed:
        sources.append(Source("input_scale", (), FLOATS, torch.float32))
    form: Grouped | Int8Rows = Int8Rows(fixed=fixed) if rounds else Grouped("int8", 0, scale=torch.float32)

    def pack(read: Tensors) -> Tensors:
        scale = read["weight_scale"].flatten()
        if len(scale) != sum(info.parts):
            scale = scale.repeat_interleave(torch.tensor(info.parts, device=scale.device))
        if isinstance(form, Grouped):
            return form.packed(read["weight"], scale[:, None])
        given = read["input_scale"].flatten().amax()[None] if fixed else scale
        return form.packed(read["weight"], scale, given, torch.zeros_like(given))

    return Scheme(form, tuple(sources), pack)


def _int4_group(info: MatrixInfo, rule: Rule, reorders: bool) -> Scheme:
    """Inputs before outputs, eight outputs a word."""
    assert rule.weights is not None
    group, signed = rule.weights.group or info.columns, rule.weights.dtype == "int4"
    check_multiples(info, inputs=group, outputs=8)
    words, groups = Axis("outputs", 8), Axis("inputs", group)
    has_zeros = not signed and not rule.weights.symmetric
    form = Grouped("int4", group, scale=torch.float32, zero=torch.uint8 if not signed else None)
    sources = (
        Source("weight", (INPUTS, words), (torch.int32,), torch.int32),
        Source("weight_scale", (groups, OUTPUTS), FLOATS, torch.float32),
        Source("weight_zero_point", (groups, words), (torch.int32,), torch.int32, default=None if has_zeros else 0),
    )

    def numbers(packed: torch.Tensor) -> torch.Tensor:
        """int32 [k, n / 8] → uint8 [n, k]."""
        found = unpack(packed, 4)
        if reorders:
            found = found.view(len(packed), -1, 8)[..., torch.tensor(PLACES, device=packed.device)].flatten(1)
        return found.t().contiguous()

    def pack(read: Tensors) -> Tensors:
        scale, codes = read["weight_scale"].t().contiguous(), numbers(read["weight"])
        if signed:
            return form.packed(codes ^ 8, scale)
        return form.packed(codes, scale, numbers(read["weight_zero_point"]))

    return Scheme(form, sources, pack)


SCHEMES: dict[tuple[str, str], Callable[[MatrixInfo, Rule, bool], Scheme]] = {
    ("fp8_e4m3", "per_tensor"): _fp8_tensor,
    ("fp8_e4m3", "per_channel"): _fp8_channel,
    ("fp8_e4m3", "per_block"): _fp8_block,
    ("fp4", "per_group"): _fp4,
    ("int8", "per_tensor"): _int8,
    ("int8", "per_channel"): _int8,
    ("int4", "per_group"): _int4_group,
    ("uint4", "per_group"): _int4_group,
}
