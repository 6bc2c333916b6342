"""AutoRound (Intel): tensors as GPTQ's or AWQ's, settings by module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.reading import read
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.quantization.base import MatrixInfo, QuantizationMethod, Scheme, plain_scheme
from quire.quantization.methods.awq import awq_scheme
from quire.quantization.methods.gptq import gptq_scheme
from quire.quantization.methods.modules import (
    OPTION,
    check_pattern,
    is_part,
    names_of,
    of_all,
    one_of,
    refuse_unknown,
)
from quire.quantization.methods.settings import KEYS, Settings, check_integers

FULL_BITS = 16
_LESS_1 = ("auto_round:auto_gptq", "auto_round:gptq")  # packings whose zeros are stored so
_PACKINGS = (*_LESS_1, "auto_round", "auto_round:gptqmodel", "auto_round:auto_awq", "auto_round:awq")
_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")  # what no module's name has


class AutoRound(QuantizationMethod):
    """own: settings of the modules that a name or a pattern in `extra_config` is about; None: they are plain."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        check_integers(config)
        packing = one_of(config, "packing_format", _PACKINGS, _LESS_1[0])
        self._is_awq, self._older, self._settings = "awq" in packing, packing in _LESS_1, Settings.read(config)
        if isinstance(blocks := config.get("block_name_to_quantize"), str):
            config = {**config, "block_name_to_quantize": [name.strip() for name in blocks.split(",") if name.strip()]}
        self._blocks = names_of(config, "block_name_to_quantize")
        self._skipped = names_of(config, "modules_to_not_convert")
        self._own: dict[str, Settings | None] = {}
        own = config.get("extra_config") or {}
        if not isinstance(own, dict) or not all(isinstance(value, dict) for value in own.values()):
            raise ConfigError(
                f"quantization_config: extra_config must be an object of objects, got {shown(own)}", OPTION
            )
        self._patterns: list[tuple[re.Pattern[str], Settings | None]] = []
        for name, value in own.items():
            bits = read(int, value, "bits", self._settings.bits)
            settings = None if bits >= FULL_BITS else Settings.read(value, self._settings)
            if _PATTERN.search(name):
                check_pattern(name, "extra_config")
                self._patterns.append((re.compile(name), settings))
            else:
                self._own[name] = settings

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> AutoRound:
        known = ("packing_format", "block_name_to_quantize", "extra_config", "modules_to_not_convert", *KEYS)
        refuse_unknown(config, known, "AutoRound")
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        settings = of_all(info, lambda module: self._of_module(module, info.role == "vocabulary"))
        if settings is None:
            return plain_scheme(info.dtype)
        if self._is_awq:
            return awq_scheme(info, replace(settings, symmetric=False))  # whose zeros are stored also where all are 8
        return gptq_scheme(info, settings, older=self._older)

    def _of_module(self, module: str, is_head: bool) -> Settings | None:
        if module in self._own:
            return self._own[module]
        for pattern, settings in self._patterns:
            if pattern.search(module):
                return settings
        if is_head or is_part(module, self._skipped):
            return None
        return self._settings if not self._blocks or is_part(module, self._blocks) else None
