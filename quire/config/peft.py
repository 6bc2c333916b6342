"""adapter_config.json as the peft library writes it: each key that changes what an adapter computes is read, or refused
by name. Format: https://huggingface.co/docs/peft/package_reference/lora
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from quire.config.reading import read, read_positive, read_section
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import read_json_object, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PARAM = "lora_path"
_REFUSED = {  # unless they are absent, null, false or empty
    "modules_to_save": "whole modules that were trained beside it",
    "trainable_token_indices": "rows of embeddings that were trained beside it",
    "layer_replication": "a model with repeated layers",
    "lora_bias": "biases of its own",
    "use_qalora": "QA-LoRA's pooled inputs",
    "use_bdlora": "block-diagonal factors",
    "alora_invocation_tokens": "factors that begin at invocation tokens (aLoRA)",
    "arrow_config": "a router over adapters (Arrow)",
    "ensure_weight_tying": "factors that embeddings and head share",
    "kasa_config": "KaSA's singular values",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "Megatron's layers",
}
_PLAIN = frozenset(
    """alpha_pattern auto_mapping base_model_name_or_path bias corda_config eva_config exclude_modules fan_in_fan_out
    inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_dropout
    lora_ga_config megatron_core peft_type peft_version qalora_group_size r rank_pattern revision runtime_config
    target_modules target_parameters task_type use_dora use_rslora""".split()  # noqa: SIM905
)
# Ways to begin that take the base model's weights apart: what is left of them is another model's adapter.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """targets: names or ends of names of modules, or one pattern; None: "all-linear"."""

    file: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    use_rslora: bool
    use_dora: bool
    targets: Sequence[str] | str | None
    excluded: Sequence[str] | str
    layers: Sequence[int] | None
    layer_patterns: Sequence[str]
    parameters: Sequence[str]

    @classmethod
    def read(cls, folder: Path, max_rank: int) -> PeftConfig:
        """Raises ConfigError for an adapter that cannot be, or that computes something else than LoRA or DoRA."""
        if not folder.is_dir():
            raise ConfigError(f"the adapter's folder {str(folder)!r} does not exist", PARAM)
        file = folder / CONFIG
        given = read_json_object(file, PARAM)
        _refuse(file, given)
        name = str(file)
        ranks, alphas = (read_section(given, key, file=name) for key in ("rank_pattern", "alpha_pattern"))
        made = cls(
            file=file,
            rank=read_positive(given, "r", 8, file=name),
            alpha=read(float, given, "lora_alpha", 8.0, file=name),
            ranks={key: read_positive(ranks, key, file=name) for key in ranks},
            alphas={key: read(float, alphas, key, file=name) for key in alphas},
            use_rslora=read(bool, given, "use_rslora", False, file=name),
            use_dora=read(bool, given, "use_dora", False, file=name),
            targets=_targets(given, name),
            excluded=_names(given, "exclude_modules", name, one_is_pattern=True),
            layers=_layers(given, name),
            layer_patterns=[*_names(given, "layers_pattern", name)],
            parameters=[*_names(given, "target_parameters", name)],
        )
        made._check(max_rank)
        if not (folder / WEIGHTS).is_file():
            others = [p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind)]
            hint = f"; {others[0]} is a pickle, which is not read: save it with safe_serialization" if others else ""
            raise ConfigError(f"{folder} holds no {WEIGHTS}{hint}", PARAM)
        return made

    def _check(self, max_rank: int) -> None:
        largest = max([self.rank, *self.ranks.values()])
        if largest > max_rank:
            raise ConfigError(
                f"{self.file}: rank {largest} is more than max_lora_rank={max_rank}; start the engine with more", PARAM
            )
        patterns = [*self.ranks, *self.alphas, *self.layer_patterns]
        patterns += [one for one in (self.targets, self.excluded) if isinstance(one, str)]
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"{self.file}: {pattern!r} is no regular expression: {error}", PARAM) from None

    def rank_of(self, module: str) -> int:
        return self.ranks.get(_key(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        alpha, rank = self.alphas.get(_key(self.alphas, module), self.alpha), self.rank_of(module)
        return alpha / (sqrt(rank) if self.use_rslora else rank)

    def selects(self, module: str) -> bool:
        """Whether the adapter is for a module of that name."""
        if isinstance(self.excluded, str):
            if self.excluded and re.fullmatch(self.excluded, module):
                return False
        elif _ends_with(module, self.excluded):
            return False
        if self.targets is None:
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        if module in self.targets:
            return True
        return _ends_with(module, self.targets) and self._has_layer(module)

    def has_parameter(self, name: str) -> bool:
        """Whether the adapter is for a parameter of that name, whichever module it is of."""
        return _ends_with(name, self.parameters)

    def _has_layer(self, module: str) -> bool:
        if self.layers is None:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\." for pattern in self.layer_patterns]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<number>\d+)\."]:
            if (found := re.match(pattern, module)) is not None:
                return int(found["number"]) in self.layers
        return False


def _key(patterns: Mapping[str, Any], module: str) -> str:
    """The first that the end of a module's name matches."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def _ends_with(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _refuse(file: Path, given: Mapping[str, Any]) -> None:
    kind = given.get("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(f"{file}: peft_type must be LORA, got {shown(kind)}", PARAM)
    for key, value in given.items():
        if key in _REFUSED and value:
            raise ConfigError(f"{file}: {key}={shown(value)} is not supported: the adapter has {_REFUSED[key]}", PARAM)
        if key not in _REFUSED and key not in _PLAIN and value:
            raise ConfigError(f"{file}: {key}={shown(value)} means nothing here, and may change the adapter", PARAM)
    if given.get("bias", "none") not in ("none", None):
        raise ConfigError(f"{file}: bias={shown(given['bias'])} is not supported: biases are the base model's", PARAM)
    begins = given.get("init_lora_weights")
    if isinstance(begins, str) and begins.lower().startswith(_CHANGES_BASE):
        raise ConfigError(
            f"{file}: init_lora_weights={begins!r} changed the base model's weights before training: save the adapter "
            "with path_initial_model_for_weight_conversion, which turns it into one of the base model itself",
            PARAM,
        )


def _names(given: Mapping[str, Any], key: str, file: str, *, one_is_pattern: bool = False) -> Sequence[str] | str:
    value = given.get(key)
    if value is None:
        return []
    if isinstance(value, str):
        return value if one_is_pattern else [value]
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{file}: {key} must be a string or a list of strings, got {shown(value)}", PARAM)
    return value


def _targets(given: Mapping[str, Any], file: str) -> Sequence[str] | str | None:
    targets = _names(given, "target_modules", file, one_is_pattern=True)
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return None
    return targets


def _layers(given: Mapping[str, Any], file: str) -> Sequence[int] | None:
    value = given.get("layers_to_transform")
    if value is None or value == []:
        return None
    layers = [value] if isinstance(value, int) else value
    if not isinstance(layers, list) or not all(type(one) is int for one in layers):
        raise ConfigError(f"{file}: layers_to_transform must be a list of integers, got {shown(value)}", PARAM)
    return layers
