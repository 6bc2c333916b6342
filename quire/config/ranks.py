"""Whether so many ranks can share a model, judged before anything is loaded."""

from __future__ import annotations

import ctypes
import os

from quire.config.families import Family, family_of
from quire.config.model_info import ModelInfo
from quire.config.reading import read_positive
from quire.config.transformers_models import TRANSFORMERS
from quire.foundation.errors import ConfigError

_OPTION = "tensor_parallel_size"
_KV_HEADS = "num_key_value_heads"


def check_ranks(size: int, info: ModelInfo, device: str, gpus: int | None = None) -> None:
    """gpus: that there are; None: in this machine.

    Raises ConfigError naming what cannot be divided by `size`, or how many GPUs there are.
    """
    if size < 1:
        raise ConfigError(f"{_OPTION} must be >= 1, got {size}", _OPTION)
    if size == 1:
        return
    _check_shares(size, info)
    if device not in ("cuda", "cpu", "torch:cuda", "torch:cpu"):
        raise ConfigError(f"{_OPTION}={size}: ranks cannot meet on {device}, it must be 1", _OPTION)
    gpus = num_gpus() if gpus is None and device == "cuda" else gpus
    if device == "cuda" and gpus is not None and size > gpus:
        raise ConfigError(f"{_OPTION}={size} needs as many GPUs, and this process may use {gpus}", _OPTION)


def possible_sizes(info: ModelInfo) -> list[int]:
    """Numbers of ranks that can share the model; [1] for a family of the user's own, which decides by itself."""
    family = family_of(info.architecture)
    if family.is_own or not family.shared:
        return [1]
    values = _shared(info, family)
    most = read_positive(info.hf_config, "num_attention_heads")
    return [size for size in range(1, most + 1) if all(_divides(size, *item) for item in values.items())]


def _check_shares(size: int, info: ModelInfo) -> None:
    if info.impl == TRANSFORMERS:
        raise ConfigError(f"{_OPTION}={size}: ranks cannot share a model that runs through transformers", _OPTION)
    family = family_of(info.architecture)
    if family.is_own:
        return  # whose keys are its own business: its layers refuse what they cannot share
    if not family.shared:
        raise ConfigError(f"{_OPTION}={size}: ranks cannot share {info.architecture}, it must be 1", _OPTION)
    wrong = [f"{key}={value}" for key, value in _shared(info, family).items() if not _divides(size, key, value)]
    if wrong:
        raise ConfigError(
            f"{_OPTION}={size} does not divide this model's {' and '.join(wrong)}; it may be "
            f"{', '.join(map(str, possible_sizes(info)))}",
            _OPTION,
        )


def _shared(info: ModelInfo, family: Family) -> dict[str, int]:
    heads = read_positive(info.hf_config, "num_attention_heads")
    return {
        key: heads if key == _KV_HEADS and info.hf_config.get(key) is None else read_positive(info.hf_config, key)
        for key in family.shared
    }


def _divides(size: int, key: str, value: int) -> bool:
    """Each of KV heads fewer than ranks is kept by several."""
    return value % size == 0 or (key == _KV_HEADS and size % value == 0)


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
