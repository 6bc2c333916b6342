"""Settings of integers that are grouped along the inputs: for all modules, and others by patterns of their names
(`dynamic`). GPTQ, AWQ and AutoRound have the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.reading import read
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.quantization.methods.modules import OPTION, check_pattern, one_of, refuse_unknown

BITS = (2, 3, 4, 8)
# How files were made: of no meaning to whoever multiplies by them. One list for GPTQ, AWQ and AutoRound, since the
# tools that make them (AutoGPTQ, GPTQModel, AutoAWQ, AutoRound, transformers) write each other's.
HISTORY = (
    "act_data_type", "act_dynamic", "act_group_aware", "act_group_size", "act_sym", "adapter", "amp", "apply_clip",
    "auto_forward_data_parallel", "autoround_version", "backend", "batch_size", "cache_block_outputs",
    "calibration", "compute_device_filter", "damp_auto_increment", "damp_percent", "dataset", "desc_act_method",
    "device", "device_map", "disable_exllama", "do_fuse", "duo_scaling", "enable_alg_ext", "enable_minmax_tuning",
    "enable_norm_bias_tuning", "enable_quanted_input", "enable_torch_compile", "exllama_config", "export_format",
    "failsafe", "fallback", "foem", "format_version", "fuse_max_seq_len", "gc_mode", "gptaq",
    "gradient_accumulate_steps", "hessian", "hyb_act", "is_marlin_format", "iters", "lm_head_low_gpu_mem_usage",
    "low_cpu_mem_usage", "low_gpu_mem_usage", "lr", "max_input_length", "meta", "minmax_lr", "mock_quantization",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_to_fuse", "mse", "not_use_best_mse", "nsamples", "offload_to_disk", "offload_to_disk_path",
    "pack_dtype", "pad_token_id", "parallel_packing", "preprocessors", "provider", "quant_block_list",
    "quant_lm_head", "quantizer", "rotation_meta", "scale_dtype", "seed", "seqlen", "smooth", "static_groups",
    "supported_types", "to_quant_block_names", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
    "vram_strategy", "wait_for_submodule_finalizers",
)  # fmt: skip

KEYS = ("bits", "group_size", "sym", "desc_act", "data_type", "act_bits", *HISTORY)  # that all three may have
_FULL_BITS = 16


def check_integers(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for other numbers, and for activations that are rounded."""
    one_of(config, "data_type", ("int",), "int")
    if read(int, config, "act_bits", _FULL_BITS) < _FULL_BITS:
        raise ConfigError(f"quantization_config: act_bits={config['act_bits']} is not supported", OPTION)


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one module. group 0: all inputs."""

    bits: int
    group: int
    is_sorted: bool
    symmetric: bool

    @classmethod
    def read(cls, config: Mapping[str, Any], base: Settings | None = None) -> Settings:
        """Raises ConfigError for what cannot be."""
        if base is None:
            base = cls(0, -1, is_sorted=False, symmetric=True)
        bits = one_of(config, "bits", BITS, base.bits or None)
        group = read(int, config, "group_size", base.group or -1)
        if group < 1 and group != -1:
            raise ConfigError(f"quantization_config: group_size must be -1 or >= 1, got {group}", OPTION)
        return cls(
            bits,
            max(group, 0),
            read(bool, config, "desc_act", base.is_sorted),
            read(bool, config, "sym", base.symmetric),
        )


class Dynamic:
    """Settings of the modules whose names a pattern matches from their beginning, the first one; None: they are not
    quantized."""

    def __init__(self, rules: Any, base: Settings) -> None:
        """Raises ConfigError for rules that are none."""
        rules = rules or {}
        if not isinstance(rules, dict) or not all(isinstance(rule, dict | None) for rule in rules.values()):
            raise ConfigError(f"quantization_config: dynamic must be an object of objects, got {shown(rules)}", OPTION)
        self._rules: list[tuple[re.Pattern[str], Settings | None]] = []
        for name, rule in rules.items():
            check_pattern(name.removeprefix("+:").removeprefix("-:"), "dynamic")
            if name.startswith("-:"):
                self._rules.append((re.compile(name[2:]), None))
                continue
            refuse_unknown(rule or {}, KEYS, f"dynamic {name!r}: such")
            self._rules.append((re.compile(name.removeprefix("+:")), Settings.read(rule or {}, base)))

    def of_module(self, module: str, usual: Settings | None) -> Settings | None:
        """usual: of one that no rule is about."""
        return next((settings for pattern, settings in self._rules if pattern.match(module)), usual)
