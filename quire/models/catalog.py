"""From an architecture's name to the file that builds it.

A family file says `architectures = ("Name", …)` at the start of a line; that line is read as text, so looking for one
model imports no other.
"""

from __future__ import annotations

import difflib
import importlib
import re
from functools import cache
from pathlib import Path

import torch

from quire.config.model_info import ModelInfo
from quire.foundation.errors import ConfigError
from quire.models.base import DecoderStack

_DECLARATION = re.compile(r"^architectures = \(([^)]*)\)", re.MULTILINE)


@cache
def supported() -> dict[str, str]:
    """Architecture → family file, without its ending."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for names in _DECLARATION.findall(file.read_text(encoding="utf-8")):
            found.update(dict.fromkeys(re.findall(r'"(\w+)"', names), file.stem))
    return found


def build(info: ModelInfo, dtype: torch.dtype, device: torch.device, max_positions: int) -> DecoderStack:
    """The model with its parameters allocated on `device`, their values not set.

    Raises ConfigError for an architecture without a family file, a quantized checkpoint or a config that cannot be.
    """
    if info.architecture not in supported():
        near = difflib.get_close_matches(info.architecture, supported(), n=1)
        hint = f" (the nearest is {near[0]})" if near else ""
        raise ConfigError(
            f"architecture {info.architecture!r} is not supported{hint}; supported: {', '.join(sorted(supported()))}",
            "model",
        )
    if info.hf_config.get("quantization_config"):
        raise ConfigError("quantized checkpoints are not supported: config.json has a quantization_config", "model")
    family = importlib.import_module(f"quire.models.{supported()[info.architecture]}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: DecoderStack = family.build(info.hf_config, max_positions)
    finally:
        torch.set_default_dtype(before)
    return model.eval()
