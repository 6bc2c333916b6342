"""Quantization methods by name: what `quantization` may say. The worker imports what it names."""

from __future__ import annotations

from quire.foundation.registry import Registry

METHODS = Registry(
    "quantization method",
    {"fp8": "quire.quantization.fp8:OnlineFp8"},
    contract="quire.quantization.base:QuantizationMethod",
    needs=("scheme", "refuses"),
    is_class=True,
)


def check_quantization(name: str) -> None:
    """Raises ConfigError naming the methods there are."""
    METHODS.check(name, "quantization")
