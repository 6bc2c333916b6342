"""What an engine counts, for programs: `LLM.get_metrics`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One number with its name and labels."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Grows only; since the engine's start."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """Of now."""

    value: float
