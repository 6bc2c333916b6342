"""TorchAO: tensors of its classes, flattened into plain ones (`_weight_qdata`, `_weight_scale`, …) of safetensors.

Which class a module's tensor has follows from its config; the loader checks shapes and types. Activations that a config
would round are rounded where that is a format of its own here (int8 by row, fp8), else multiplied as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from quire.config.reading import read_count, read_positive
from quire.foundation.errors import ConfigError, WeightsError
from quire.foundation.json_file import shown
from quire.kernels.gemm.fp8_linear import E4M3
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
from quire.quantization.fp8 import Fp8Channel
from quire.quantization.grouped import Grouped
from quire.quantization.int8_rows import Int8Rows
from quire.quantization.methods.floats import nibbles
from quire.quantization.methods.modules import (
    OPTION,
    check_multiples,
    check_pattern,
    is_part,
    names_of,
    of_all,
    refuse_unknown,
)

QDATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
# Of how it was made or is run, not of what it stands for.
_HISTORY = (
    "set_inductor_config", "mm_config", "kernel_preference", "intx_choose_qparams_algorithm",
    "int4_choose_qparams_algorithm", "hqq_params",
    "activation_value_lb", "activation_value_ub", "activation_dtype", "weight_only_decode", "scale_dtype",
    "weight_scale_dtype", "reduce_range", "version", "layout",
)  # fmt: skip
_MODULES = ("FqnToConfig", "ModuleFqnToConfig")


class TorchAO(QuantizationMethod):
    def __init__(self, config: Mapping[str, Any]) -> None:
        known = ("quant_type", "modules_to_not_convert", "include_input_output_embeddings", "untie_embedding_weights")
        refuse_unknown(config, known, "TorchAO")
        for key in ("include_input_output_embeddings", "untie_embedding_weights"):
            if config.get(key):
                raise ConfigError(f"quantization_config: {key}=true is not supported: embeddings stay plain", OPTION)
        kinds = config.get("quant_type")
        if not isinstance(kinds, dict) or list(kinds) != ["default"]:
            raise ConfigError(
                f"quantization_config: quant_type must be an object with a default, got {shown(kinds)}; files of "
                "TorchAO before 0.10 are not supported",
                OPTION,
            )
        self._rules = _rules(kinds["default"])
        self._skipped = names_of(config, "modules_to_not_convert")

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> TorchAO:
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        rule = of_all(info, self._of_module)
        if rule is None:
            return plain_scheme(info.dtype)
        kind, values = _named(rule)
        if kind not in SCHEMES:
            known = ", ".join(SCHEMES)
            raise ConfigError(f"quantization_config: TorchAO's {kind} is not supported (known: {known})", OPTION)
        return SCHEMES[kind](info, values)

    def _of_module(self, module: str) -> Any:
        """The config of one; None: it is plain."""
        if is_part(module, self._skipped):
            return None
        for name, rule in self._rules.items():
            if name == module or name.removesuffix(".weight") == module:
                return rule
        for name, rule in self._rules.items():
            if name.startswith("re:") and re.fullmatch(name[3:], module):
                return rule
        return None if module == "lm_head" or module.endswith(".lm_head") else self._rules.get("_default")


def _rules(default: Any) -> dict[str, Any]:
    """Configs by module, by pattern (`re:`) and of all others (`_default`)."""
    kind, values = _named(default)
    if kind not in _MODULES:
        return {"_default": default}
    rules = values.get("fqn_to_config") or values.get("module_fqn_to_config")
    if not isinstance(rules, dict):
        raise ConfigError(f"quantization_config: {kind} must have a fqn_to_config, got {shown(values)}", OPTION)
    for name in rules:
        check_pattern(name.removeprefix("re:") if name.startswith("re:") else "", "fqn_to_config")
    return rules


def _named(value: Any) -> tuple[str, dict[str, Any]]:
    """An object of TorchAO's: the name of its class, and its fields. Raises ConfigError for what is none."""
    if not isinstance(value, dict) or not isinstance(value.get("_type"), str):
        raise ConfigError(f"quantization_config: TorchAO configs are objects with a _type, got {shown(value)}", OPTION)
    fields = value.get("_data")
    return value["_type"], fields if isinstance(fields, dict) else {}


def _value(fields: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A field that is an enum, a dtype or a plain value."""
    found = fields.get(key, default)
    return found.get("_data") if isinstance(found, dict) and not isinstance(found.get("_data"), dict) else found


def _check(fields: Mapping[str, Any], known: tuple[str, ...], kind: str) -> None:
    refuse_unknown(fields, (*known, *_HISTORY), f"TorchAO {kind} of")


def _group(fields: Mapping[str, Any], key: str, info: MatrixInfo) -> int:
    """Inputs that share a scale; 0: all of them. Raises ConfigError for other granularities."""
    kind, values = _named(fields[key]) if fields.get(key) else ("PerRow", {})
    if kind == "PerGroup":
        group = read_positive(values, "group_size", file="quantization_config")
        check_multiples(info, inputs=group)
        return group
    if kind == "PerRow" or (kind == "PerAxis" and values.get("axis") == 0):
        return 0
    raise ConfigError(f"quantization_config: TorchAO's granularity {kind} is not supported", OPTION)


def _groups(group: int, info: MatrixInfo) -> Axis | int:
    return Axis("inputs", group) if group and group < info.columns else 1


def _int8(info: MatrixInfo, fields: dict[str, Any]) -> Scheme:
    _check(fields, ("group_size", "granularity"), "Int8WeightOnlyConfig")
    group = read_count(fields, "group_size", 0, file="quantization_config") or _group(fields, "granularity", info)
    form = Grouped("int8", group, scale=torch.float32)
    sources = _int8_sources(info, group)

    def pack(read: Tensors) -> Tensors:
        _refuse_zeros(read[ZERO], info)
        return form.packed(read[QDATA], read[SCALE])

    return Scheme(form, sources, pack)


def _int8_sources(info: MatrixInfo, group: int) -> tuple[Source, ...]:
    groups = _groups(group, info)
    return (
        Source(QDATA, (OUTPUTS, INPUTS), (torch.int8,), torch.int8),
        Source(SCALE, (OUTPUTS, groups), FLOATS, torch.float32),
        Source(ZERO, (OUTPUTS, groups), (torch.int8, torch.int32, torch.int64), torch.int8, default=0),
    )


def _refuse_zeros(zero: torch.Tensor, info: MatrixInfo) -> None:
    if bool(zero.any()):
        raise WeightsError(f"{', '.join(info.modules)}: zero points, where the config says there are none", "model")


def _int8_rows(info: MatrixInfo, fields: dict[str, Any]) -> Scheme:
    _check(fields, ("granularity", "act_mapping_type"), "Int8DynamicActivationInt8WeightConfig")
    mapping = _value(fields, "act_mapping_type", "SYMMETRIC")
    if _group(fields, "granularity", info) or str(mapping).upper() != "SYMMETRIC":
        raise ConfigError(f"quantization_config: act_mapping_type={shown(mapping)} by group is not supported", OPTION)
    form = Int8Rows()

    def pack(read: Tensors) -> Tensors:
        _refuse_zeros(read[ZERO], info)
        scale = read[SCALE].flatten()
        return form.packed(read[QDATA], scale, scale, scale)

    return Scheme(form, _int8_sources(info, 0), pack)


def _fp8(info: MatrixInfo, fields: dict[str, Any]) -> Scheme:
    """Scales an output; one for all is stored as [1, 1]."""
    _check(fields, ("weight_dtype", "activation_dtype", "granularity"), "Float8WeightOnlyConfig")
    if _value(fields, "weight_dtype", "float8_e4m3fn") != "float8_e4m3fn":
        raise ConfigError(f"quantization_config: weight_dtype={shown(fields['weight_dtype'])} is not supported", OPTION)
    found = fields.get("granularity")
    kinds = {_named(one)[0] for one in (found if isinstance(found, list) else [found]) if one}
    if not kinds <= {"PerRow", "PerTensor"}:
        raise ConfigError(f"quantization_config: granularity {', '.join(sorted(kinds))} is not supported", OPTION)
    whole = kinds == {"PerTensor"}
    sources = (
        Source(QDATA, (OUTPUTS, INPUTS), (E4M3,), E4M3),
        Source(SCALE, (1, 1) if whole else (OUTPUTS, 1), FLOATS, torch.float32),
    )

    def pack(read: Tensors) -> Tensors:
        scale = read[SCALE].flatten()
        if whole:
            scale = scale.repeat_interleave(torch.tensor(info.parts, device=scale.device))
        return {"weight": read[QDATA], "weight_scale": scale}

    return Scheme(Fp8Channel(), sources, pack)


def _intx(info: MatrixInfo, fields: dict[str, Any]) -> Scheme:
    """Integers of 1 to 8 bits, a byte each in the file."""
    key = "weight_granularity" if "weight_granularity" in fields else "granularity"
    known = (
        "weight_dtype", "granularity", "weight_granularity", "mapping_type", "weight_mapping_type", "act_mapping_type",
        "intx_packing_format",
    )  # fmt: skip
    _check(fields, known, "IntxWeightOnlyConfig")
    packing = str(_value(fields, "intx_packing_format", "UNPACKED_TO_INT8")).upper()
    bits = re.fullmatch(r"int([1-8])", str(_value(fields, "weight_dtype", "int8")))
    if packing != "UNPACKED_TO_INT8" or bits is None:
        raise ConfigError(
            f"quantization_config: intx_packing_format={packing} with weight_dtype={shown(fields.get('weight_dtype'))} "
            "is not supported",
            OPTION,
        )
    group, is_small = _group(fields, key, info), int(bits[1]) <= 4
    form = Grouped(
        "int4" if is_small else "int8", group, scale=torch.float32, zero=torch.uint8 if is_small else torch.int8
    )

    def pack(read: Tensors) -> Tensors:
        numbers, zero = read[QDATA], read[ZERO]
        if is_small:
            numbers, zero = (numbers + 8).view(torch.uint8), (zero + 8).view(torch.uint8)
        return form.packed(numbers, read[SCALE], zero)

    return Scheme(form, _int8_sources(info, group), pack)


def _int4(info: MatrixInfo, fields: dict[str, Any]) -> Scheme:
    """Two a byte, low halves first; `q * scale + zero`, with q from -8 on, and groups before outputs."""
    _check(fields, ("group_size", "int4_packing_format"), "Int4WeightOnlyConfig")
    packing = str(_value(fields, "int4_packing_format", "plain")).lower()
    if packing != "plain":
        raise ConfigError(
            f"quantization_config: int4_packing_format={packing} is of one device's kernels and is not supported: save "
            "the model with int4_packing_format=plain",
            OPTION,
        )
    group = read_positive(fields, "group_size", 128, file="quantization_config")
    check_multiples(info, inputs=group)
    form = Grouped("int4", group, scale=torch.float32, zero=torch.float32)
    sources = (
        Source(QDATA, (OUTPUTS, Axis("inputs", 2)), (torch.int8, torch.uint8), torch.int8),
        Source(SCALE, (Axis("inputs", group), OUTPUTS), FLOATS, torch.float32),
        Source(ZERO, (Axis("inputs", group), OUTPUTS), FLOATS, torch.float32),
    )

    def pack(read: Tensors) -> Tensors:
        numbers = nibbles(read[QDATA].view(torch.uint8)) ^ 8
        scale, offset = read[SCALE].t().contiguous(), read[ZERO].t().contiguous()
        step = torch.where(scale == 0, 1, scale)
        return form.packed(numbers, step, 8 - offset / step)

    return Scheme(form, sources, pack)


SCHEMES = {
    "Int8WeightOnlyConfig": _int8,
    "Int8DynamicActivationInt8WeightConfig": _int8_rows,
    "Float8WeightOnlyConfig": _fp8,
    "Float8DynamicActivationFloat8WeightConfig": _fp8,
    "IntxWeightOnlyConfig": _intx,
    "Int8DynamicActivationIntxWeightConfig": _intx,
    "Int4WeightOnlyConfig": _int4,
}
