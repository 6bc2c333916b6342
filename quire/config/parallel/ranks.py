"""Whether so many ranks can share a model, judged before anything is loaded."""

from __future__ import annotations

import ctypes
import os

from quire.config.families import Family, family_of
from quire.config.model_info import ModelInfo
from quire.config.parallel.expert_balance import ExpertBalance
from quire.config.reading import read_positive
from quire.config.runtime import RuntimeConfig
from quire.config.transformers_models import TRANSFORMERS
from quire.foundation.errors import ConfigError
from quire.types.stages import split

_OPTION, _STAGES, _LAYERS = "tensor_parallel_size", "pipeline_parallel_size", "pipeline_parallel_layers"
_CONTEXTS = "prefill_context_parallel_size"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Of these, fewer than ranks are kept by several each.
_COPIED = (
    "num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_groups", "mamba_n_groups", "mamba_ngroups",
    "linear_num_key_heads",
)  # fmt: skip
_AS_HEADS = (*_COPIED, "linear_num_value_heads")  # as many as there are heads, if nothing is said
_SECTIONS = {"linear_num_heads": ("linear_attn_config", "num_heads")}  # where older files have them
_MOST = 64  # ranks of a model without attention heads


def check_ranks(runtime: RuntimeConfig, info: ModelInfo, device: str, gpus: int | None = None) -> None:
    """gpus: that there are; None: in this machine.

    Raises ConfigError naming what cannot be divided among the ranks, or how many GPUs there are.
    """
    size, stages = runtime.tensor_parallel_size, runtime.pipeline_parallel_size
    shape = {_OPTION: size, _STAGES: stages, _CONTEXTS: runtime.prefill_context_parallel_size}
    if size > 1:
        _check_shares(size, info, runtime)
    if runtime.enable_expert_parallel and not expert_keys(info):
        raise ConfigError(f"enable_expert_parallel: {info.architecture} has no experts", "enable_expert_parallel")
    redundant = ExpertBalance.read(runtime).num_redundant_experts
    for key in expert_keys(info) if redundant else ():
        if redundant > (most := (size - 1) * read_positive(info.hf_config, key)):
            raise ConfigError(
                f"eplb_config: num_redundant_experts must be <= {most}, a copy on every rank, got {redundant}",
                "eplb_config",
            )
    if runtime.num_ranks == 1:
        return
    told = ", ".join(f"{option}={count}" for option, count in shape.items() if count > 1)
    option = next(option for option, count in reversed(shape.items()) if count > 1)
    if device not in ("cuda", "cpu", "torch:cuda", "torch:cpu"):
        raise ConfigError(f"{told}: ranks cannot meet on {device}, it must be 1", option)
    gpus = num_gpus() if gpus is None and device == "cuda" else gpus
    if device == "cuda" and gpus is not None and runtime.num_ranks > gpus:
        needed = str(runtime.num_ranks) if "," in told else "as many"
        raise ConfigError(f"{told} needs {needed} GPUs, and this process may use {gpus}", option)


def check_stages(runtime: RuntimeConfig, info: ModelInfo, *, pools: bool) -> None:
    """Raises ConfigError naming what stages do not do, and for a split that does not make the model."""
    stages, counts = runtime.pipeline_parallel_size, runtime.pipeline_parallel_layers
    if stages == 1:
        if counts:
            raise ConfigError(
                f"{_LAYERS} deals layers to stages: set {_STAGES}={len(counts)}, or leave it out", _LAYERS
            )
        return
    why = ""
    if pools:
        why = "stages are for models that generate, and this one pools"
    elif info.impl == TRANSFORMERS:
        why = "a model that runs through transformers is not dealt to stages"
    if why:
        raise ConfigError(f"{_STAGES}={stages}: {why}", _STAGES)
    layers = info.hf_config.get("num_hidden_layers")
    if isinstance(layers, int):
        split(layers, stages, counts)


def possible_sizes(info: ModelInfo) -> list[int]:
    """Numbers of ranks that can share the model; [1] for a family of the user's own, which decides by itself."""
    family = family_of(info.architecture)
    if family.is_own or not family.shared:
        return [1]
    values = _shared(info, family)
    most = min(values.get("num_attention_heads", (_MOST,)))
    return [
        size
        for size in range(1, most + 1)
        if all(_divides(size, key, count) for key, counts in values.items() for count in counts)
    ]


def expert_keys(info: ModelInfo) -> list[str]:
    """Of config.json that count experts, if there are any."""
    return [key for key in _EXPERTS if isinstance(count := info.hf_config.get(key), int) and count > 1]


def _check_shares(size: int, info: ModelInfo, runtime: RuntimeConfig) -> None:
    if info.impl == TRANSFORMERS:
        raise ConfigError(f"{_OPTION}={size}: ranks cannot share a model that runs through transformers", _OPTION)
    family = family_of(info.architecture)
    if family.is_own:
        return  # whose keys are its own business: its layers refuse what they cannot share
    if not family.shared:
        raise ConfigError(f"{_OPTION}={size}: ranks cannot share {info.architecture}, it must be 1", _OPTION)
    values = _shared(info, family)
    if runtime.enable_expert_parallel:
        values.pop("moe_intermediate_size", None)
        for key in expert_keys(info):
            if (count := read_positive(info.hf_config, key)) < size:
                raise ConfigError(
                    f"enable_expert_parallel: {_OPTION}={size} is more than the model's {key}={count}", _OPTION
                )
    wrong = [f"{key}={n}" for key, counts in values.items() for n in counts if not _divides(size, key, n)]
    if wrong:
        raise ConfigError(
            f"{_OPTION}={size} does not divide this model's {' and '.join(wrong)}; it may be "
            f"{', '.join(map(str, possible_sizes(info)))}",
            _OPTION,
        )


def _shared(info: ModelInfo, family: Family) -> dict[str, list[int]]:
    """By key the numbers that it stands for: several, if layers have each their own. What is left out is what families
    take for it: as many heads as queries have, four times the hidden size."""
    found = {}
    for key in family.shared:
        section, inner = _SECTIONS.get(key, ("", ""))
        older = info.hf_config.get(section)
        told = older.get(inner) if isinstance(older, dict) else None
        told = info.hf_config.get(key) if told is None else told
        if told is not None:
            found[key] = [read_positive({key: one}, key) for one in (told if isinstance(told, list) else [told])]
        elif key in _AS_HEADS:
            found[key] = [read_positive(info.hf_config, "num_attention_heads")]
        else:
            found[key] = [4 * read_positive(info.hf_config, "hidden_size")]
    return {key: list(dict.fromkeys(counts)) for key, counts in found.items()}


def _divides(size: int, key: str, value: int) -> bool:
    return value % size == 0 or (key in _COPIED and size % value == 0)


def num_gpus() -> int | None:
    """GPUs that this process may use; None if nobody tells. Asked of the driver's management library, which, unlike the
    driver itself, may be asked in a process that forks."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count.value
    names = [name.strip() for name in visible.split(",")]
    ends = [place for place, name in enumerate(names) if name in ("", "-1")]  # what comes behind does not count
    return min(len(names[: ends[0]] if ends else names), count.value)
