"""Platforms: where a worker runs."""

from __future__ import annotations

from quire.config.devices import PLATFORMS
from quire.platforms.base import Platform

__all__ = ["Platform", "select_platform"]


def select_platform(device: str) -> Platform:
    """device: as `config.devices` has them. Raises ConfigError for a name that is none of the platforms'."""
    name, _, what = device.partition(":")
    PLATFORMS.check(name, "device")
    platform: Platform = PLATFORMS.get(name)(what)
    return platform
