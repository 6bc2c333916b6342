"""Which of a checkpoint's modules a rule is about, and rules for all modules of one matrix; keys that nobody knows."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.quantization.base import Axis, MatrixInfo, Scheme, Source, Tensors, UnlikeError, plain_scheme

Rule = TypeVar("Rule")
OPTION = "quantization"


def of_all(info: MatrixInfo, rule: Callable[[str], Rule]) -> Rule:
    """What the rule says of every module of the matrix, by any of its names. Raises UnlikeError if they differ."""
    found = {module: _of_any_name(rule, module, info.spelled.get(module, ())) for module in info.modules}
    first, *others = found.values()
    if any(other != first for other in others):
        named = ", ".join(found)
        raise UnlikeError(f"quantization_config: {named} are one matrix here and are not quantized alike", OPTION)
    return first


def _of_any_name(rule: Callable[[str], Rule], module: str, others: Iterable[str]) -> Rule:
    """Of a name that the settings mean in particular, else of the module's own."""
    usual = rule(module)
    return next((found for other in others if (found := rule(other)) != usual), usual)


def check_multiples(info: MatrixInfo, *, inputs: int = 1, outputs: int = 1) -> None:
    """Raises ConfigError if the matrix has others."""
    if inputs < 1:
        raise ConfigError(f"quantization_config: group_size must be >= 1, got {inputs}", OPTION)
    if info.columns % inputs:
        raise ConfigError(
            f"quantization_config: {info.modules[0]} has {info.columns} inputs, no multiple of {inputs}", OPTION
        )
    if any(rows % outputs for rows in info.parts):
        raise ConfigError(
            f"quantization_config: {', '.join(info.modules)} have {', '.join(map(str, info.parts))} outputs, "
            f"not all a multiple of {outputs}",
            OPTION,
        )


def own_groups(info: MatrixInfo, size: int) -> slice:
    """Of groups of so many inputs those that this rank has. Raises ConfigError if it has some only in part."""
    for place in info.inputs:
        if place % size:
            raise ConfigError(
                f"quantization_config: inputs of {info.modules[0]} are stored {size} together and cannot be cut at "
                f"{place}",
                OPTION,
            )
    first, last = info.inputs
    return slice(first // size, last // size)


def cut_when_packed(scheme: Scheme, info: MatrixInfo) -> Scheme:
    """Of a matrix whose inputs are ordered as a whole: a rank that has but some of them reads all, and keeps its own in
    plain numbers, since groups of them have no common size."""
    first, last = info.inputs
    pack, form = scheme.pack, scheme.format
    if (first, last) == (0, info.columns) or pack is None:
        return scheme

    def plain(read: Tensors) -> Tensors:
        return {"weight": form.matrix(pack(read), None).dense(info.dtype)[:, first:last]}

    sources = tuple(of_all_inputs(source, info) for source in scheme.sources)
    return Scheme(plain_scheme(info.dtype).format, sources, plain)


def of_all_inputs(source: Source, info: MatrixInfo) -> Source:
    """The same, read whole by a rank that has but some of the inputs."""

    def whole(axis: Axis | int) -> Axis | int:
        return axis.count(info.columns) if isinstance(axis, Axis) and axis.of == "inputs" else axis

    return replace(source, axes=tuple(map(whole, source.axes)))


def is_part(module: str, names: Iterable[str]) -> bool:
    """Whether one of the names is the module's, or pieces of its path that stand together: `lm_head`, `mlp.gate`,
    `model.layers.0`; or a pattern of its name: of wildcards, then also of what it is in, or regular behind `re:`."""
    return any(_is_part(module, name) for name in names)


def _is_part(module: str, name: str) -> bool:
    if name.startswith("re:"):
        return re.match(name[3:], module) is not None
    if "*" in name or "?" in name:
        pieces = module.split(".")
        return any(fnmatch.fnmatchcase(".".join(pieces[: i + 1]), name) for i in range(len(pieces)))
    return f".{name.strip('.')}." in f".{module}."


def names_of(config: Mapping[str, Any], *keys: str) -> list[str]:
    """Lists of names, the first that is there. Raises ConfigError if it is none, or holds a pattern that is none."""
    for key in keys:
        names = config.get(key)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"quantization_config: {key} must be a list of strings, got {shown(names)}", OPTION)
        for name in names:
            check_pattern(name.removeprefix("re:") if name.startswith("re:") else "", key)
        return names
    return []


def check_pattern(pattern: str, key: str) -> None:
    """Raises ConfigError if it is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"quantization_config: {key}: {pattern!r} is no regular expression: {error}", OPTION
        ) from None


def refuse_unknown(config: Mapping[str, Any], known: Iterable[str], method: str) -> None:
    """Raises ConfigError naming the keys that this method does not know, but for those that say nothing."""
    unknown = sorted(
        key for key in config.keys() - {"quant_method", *known} if config[key] not in (None, False, [], {})
    )
    if unknown:
        named = ", ".join(f"{key}={shown(config[key])}" for key in unknown)
        raise ConfigError(f"quantization_config: {method} checkpoints with {named} are not supported", OPTION)


def one_of(config: Mapping[str, Any], key: str, allowed: Iterable[Any], default: Any) -> Any:
    """config[key], if it is one of these; None is the default. Raises ConfigError."""
    value = config.get(key)
    value = default if value is None else value
    if not any(type(value) is type(item) and value == item for item in allowed):
        known = ", ".join(map(str, allowed))
        raise ConfigError(f"quantization_config: {key} must be one of {known}, got {shown(value)}", OPTION)
    return value
