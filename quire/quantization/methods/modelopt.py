"""NVIDIA ModelOpt: FP8, NVFP4 and MXFP8, one for all or by module (`quantized_layers`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.quantization.base import MatrixInfo, QuantizationMethod, Scheme, plain_scheme
from quire.quantization.methods import floats
from quire.quantization.methods.modules import (
    OPTION,
    check_multiples,
    is_part,
    names_of,
    of_all,
    one_of,
    refuse_unknown,
)

_NVFP4 = {"weight": "weight", "scale": "weight_scale", "factor": "weight_scale_2"}
ALGORITHMS: dict[str, Callable[[MatrixInfo], Scheme]] = {
    "FP8": floats.per_tensor,
    "FP8_PER_CHANNEL_PER_TOKEN": lambda _: floats.per_channel(more=()),
    "FP8_PB_WO": lambda info: floats.per_block(info, 128, 128, "weight_scale", spread=True),
    "NVFP4": lambda info: floats.nvfp4(info, _NVFP4, inverse=False),
    "W4A16_NVFP4": lambda info: floats.nvfp4(info, _NVFP4, inverse=False),
    "MXFP8": lambda _: floats.micro_scaled(),
}
_INPUTS = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}  # that share a scale


class ModelOpt(QuantizationMethod):
    unused = floats.UNUSED

    def __init__(self, config: Mapping[str, Any]) -> None:
        known = (
            "quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "group_size", "exclude_modules", "ignore",
            "quantized_layers", "producer", "config_groups", "quant_type", "has_zero_point", "pre_quant_scale",
        )  # fmt: skip
        refuse_unknown(config, known, "ModelOpt")
        for key in ("has_zero_point", "pre_quant_scale"):
            one_of(config, key, (False,), default=False)
        self._algorithm: str | None = None  # nothing but the cache is quantized
        if config.get("quant_algo") is not None or not config.get("kv_cache_quant_algo"):
            self._algorithm = one_of(config, "quant_algo", (*ALGORITHMS, "MIXED_PRECISION"), None)
        self._excluded = [*names_of(config, "exclude_modules"), *names_of(config, "ignore")]
        layers = config.get("quantized_layers") or {}
        if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
            raise ConfigError(f"quantization_config: quantized_layers must be objects, got {shown(layers)}", OPTION)
        self._layers: dict[str, str] = {
            name: one_of(layer, "quant_algo", ALGORITHMS, None) for name, layer in layers.items()
        }
        size = config.get("group_size")
        if size not in (None, _INPUTS.get(self._algorithm or "", size)):
            raise ConfigError(
                f"quantization_config: group_size={shown(size)} with {self._algorithm} is not supported", OPTION
            )

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> ModelOpt:
        inner = config.get("quantization")
        return cls({**inner, "producer": config.get("producer")} if isinstance(inner, dict) else config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        algorithm = of_all(info, self._of_module)
        if algorithm is None:
            return plain_scheme(info.dtype)
        check_multiples(info, inputs=_INPUTS.get(algorithm, 1))
        return ALGORITHMS[algorithm](info)

    def _of_module(self, module: str) -> str | None:
        if is_part(module, self._excluded):
            return None
        if self._algorithm != "MIXED_PRECISION":
            return self._algorithm
        if module in self._layers:
            return self._layers[module]
        return next((algorithm for name, algorithm in self._layers.items() if is_part(module, [name])), None)
