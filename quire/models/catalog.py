"""From an architecture's name to the file that builds it (which `config/families.py` finds), and to a model."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quire.config import own_families
from quire.config.families import family_of
from quire.config.model_info import ModelInfo
from quire.config.pooler import PoolerConfig
from quire.foundation.errors import ConfigError
from quire.models.base import DecoderStack
from quire.models.pooling import PoolingModel, make_head

_TOO_LARGE = re.compile("allocate|overflow")


def build(info: ModelInfo, dtype: torch.dtype, device: torch.device, max_positions: int) -> DecoderStack:
    """The model with its parameters allocated on `device`, their values not set.

    Raises ConfigError for an architecture without a family file, a quantized checkpoint or a config that cannot be.
    """
    with _allocating(dtype, device):
        family = _family(info)
        model = family.build(_config(info, family), max_positions)
    if not isinstance(model, DecoderStack):
        raise ConfigError(f"{info.architecture} does not generate: set runner to auto or pooling", "runner")
    return model.eval()


def build_for_pooling(
    info: ModelInfo, pooler: PoolerConfig, dtype: torch.dtype, device: torch.device, max_positions: int
) -> PoolingModel:
    """The same for a model that makes vectors."""
    family = _family(info)
    config = _config(info, family)
    if pooler.label_tokens is None:  # no logits are wanted
        config = {**config, "tie_word_embeddings": True}
    with _allocating(dtype, device):
        trunk = family.build(config, max_positions)
        head = make_head(pooler, info.architecture, config, getattr(family, "classifier", None))
        return PoolingModel(trunk, head, pooler, getattr(family, "unused", None)).eval()


def _config(info: ModelInfo, family: Any) -> dict[str, Any]:
    """With what a family of the user's own takes for missing keys; ours have been read before."""
    return {**getattr(family, "defaults", {}), **info.hf_config} if info.family else info.hf_config


def _family(info: ModelInfo) -> Any:
    if info.family:
        return own_families.find(info.family)
    return importlib.import_module(f"quire.models.{family_of(info.architecture).name}")


@contextmanager
def _allocating(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not _TOO_LARGE.search(str(error)):
            raise
        raise ConfigError(f"config.json: a model of these sizes cannot be allocated: {error}", "model") from None
    finally:
        torch.set_default_dtype(before)
