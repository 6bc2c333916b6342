"""The method of a model: the one that its checkpoint names, or one that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.quantization import METHODS
from quire.quantization.base import QuantizationMethod
from quire.quantization.plain import Unquantized


def make_method(name: str | None, checkpoint: Mapping[str, Any]) -> QuantizationMethod:
    """name: None, everything plain. checkpoint: its `quantization_config`, {} if it is plain.

    Raises ConfigError for settings that are not supported.
    """
    if name is None:
        return Unquantized()
    found: QuantizationMethod = METHODS.get(name).of_checkpoint(checkpoint) if checkpoint else METHODS.get(name)()
    return found
