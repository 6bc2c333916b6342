"""From an architecture's name to the file that builds it.

A family file says `architectures = ("Name", …)` at the start of a line; that line is read as text, so looking for one
model imports no other.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quire.config import own_families
from quire.config.model_info import ModelInfo
from quire.config.pooler import Pooler
from quire.foundation.errors import ConfigError
from quire.models.base import DecoderStack
from quire.models.pooling import PoolingModel, make_head

_DECLARATION = re.compile(r"^architectures = \(([^)]*)\)", re.MULTILINE)


@cache
def supported() -> dict[str, str]:
    """Architecture → family file, without its ending."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for names in _DECLARATION.findall(file.read_text(encoding="utf-8")):
            found.update(dict.fromkeys(re.findall(r'"(\w+)"', names), file.stem))
    return found


def family_of(architecture: str) -> str | None:
    """The family file of an architecture; None if there is none. A decoder's trunk, alone or under a classifier, is
    named after the decoder."""
    decoder = re.sub(r"(ForSequenceClassification|ForTokenClassification|Model)$", "ForCausalLM", architecture)
    return supported().get(architecture) or supported().get(decoder)


def build(info: ModelInfo, dtype: torch.dtype, device: torch.device, max_positions: int) -> DecoderStack:
    """The model with its parameters allocated on `device`, their values not set.

    Raises ConfigError for an architecture without a family file, a quantized checkpoint or a config that cannot be.
    """
    with _allocating(dtype, device):
        model = _family(info).build(info.hf_config, max_positions)
    if not isinstance(model, DecoderStack):
        raise ConfigError(f"{info.architecture} does not generate: set runner to auto or pooling", "runner")
    return model.eval()


def build_for_pooling(
    info: ModelInfo, pooler: Pooler, dtype: torch.dtype, device: torch.device, max_positions: int
) -> PoolingModel:
    """The same for a model that makes vectors."""
    family, config = _family(info), info.hf_config
    if pooler.label_tokens is None:  # no logits are wanted
        config = {**config, "tie_word_embeddings": True}
    with _allocating(dtype, device):
        trunk = family.build(config, max_positions)
        head = make_head(pooler, info.architecture, config, getattr(family, "classifier", None))
        return PoolingModel(trunk, head, pooler, getattr(family, "unused", None)).eval()


def _family(info: ModelInfo) -> Any:
    name = family_of(info.architecture)
    if name is None and not info.family:
        near = difflib.get_close_matches(info.architecture, supported(), n=1)
        hint = f" (the nearest is {near[0]})" if near else ""
        raise ConfigError(
            f"architecture {info.architecture!r} is not supported{hint}; supported: {', '.join(sorted(supported()))}",
            "model",
        )
    if info.hf_config.get("quantization_config"):
        raise ConfigError("quantized checkpoints are not supported: config.json has a quantization_config", "model")
    return own_families.find(info.family) if info.family else importlib.import_module(f"quire.models.{name}")


@contextmanager
def _allocating(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
