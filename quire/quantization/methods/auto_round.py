"""AutoRound (Intel): tensors as GPTQ's or AWQ's, settings by module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.quantization.base import MatrixInfo, QuantizationMethod, Scheme, plain_scheme
from quire.quantization.methods.awq import awq_scheme
from quire.quantization.methods.gptq import Settings, gptq_scheme
from quire.quantization.methods.modules import OPTION, is_part, names_of, of_all, one_of, refuse_unknown

_HISTORY = (
    "amp", "batch_size", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "iters", "dataset",
    "gradient_accumulate_steps", "low_gpu_mem_usage", "lr", "minmax_lr", "nsamples", "scale_dtype", "seqlen", "seed",
    "autoround_version", "backend", "act_bits", "act_dynamic", "act_group_size", "act_sym", "act_data_type", "provider",
    "not_use_best_mse", "enable_torch_compile", "low_cpu_mem_usage", "true_sequential", "damp_percent", "device_map",
    "quant_block_list", "supported_types", "quant_lm_head", "export_format", "to_quant_block_names",
)  # fmt: skip
FULL_BITS = 16


class AutoRound(QuantizationMethod):
    def __init__(self, config: Mapping[str, Any]) -> None:
        one_of(config, "data_type", ("int",), "int")
        if read(int, config, "act_bits", FULL_BITS) < FULL_BITS:
            raise ConfigError(
                f"quantization_config: AutoRound checkpoints with act_bits={config['act_bits']} are not supported",
                OPTION,
            )
        packings = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round", "auto_round:gptq", "auto_round:awq")
        packing = one_of(config, "packing_format", packings, "auto_round:auto_gptq")
        self._is_awq, self._settings = "awq" in packing, Settings.read(config)
        if packing in ("auto_round", "auto_round:gptq") and not self._settings.symmetric:
            raise ConfigError(f"quantization_config: packing_format={packing} with sym=false is not supported", OPTION)
        blocks = config.get("block_name_to_quantize") or []
        self._blocks = blocks.split(",") if isinstance(blocks, str) else names_of(config, "block_name_to_quantize")
        self._skipped = names_of(config, "modules_to_not_convert")
        self._own: dict[str, Settings | None] = {}
        own = config.get("extra_config") or {}
        if not isinstance(own, dict) or not all(isinstance(value, dict) for value in own.values()):
            raise ConfigError(
                f"quantization_config: extra_config must be an object of objects, got {shown(own)}", OPTION
            )
        for name, value in own.items():
            bits = read(int, value, "bits", self._settings.bits)
            self._own[name] = None if bits >= FULL_BITS else Settings.read(value, self._settings)

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> AutoRound:
        known = (
            "bits", "group_size", "sym", "data_type", "packing_format", "block_name_to_quantize", "extra_config",
            "modules_to_not_convert", *_HISTORY,
        )  # fmt: skip
        refuse_unknown(config, known, "AutoRound")
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        settings = of_all(info, lambda module: self._of_module(module, info.role == "vocabulary"))
        if settings is None:
            return plain_scheme(info.dtype)
        if not self._is_awq:
            return gptq_scheme(info, settings, older=True)
        one_of({"bits": settings.bits}, "bits", (4,), None)
        return awq_scheme(info, settings.group or -1, has_zeros=True)

    def _of_module(self, module: str, is_head: bool) -> Settings | None:
        for name, settings in self._own.items():
            if module == name:
                return settings
        if is_head or is_part(module, self._skipped):
            return None
        return self._settings if not self._blocks or is_part(module, self._blocks) else None
