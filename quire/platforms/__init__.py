"""Platforms: where a worker runs."""

from __future__ import annotations

from quire.foundation.errors import ConfigError
from quire.platforms.base import Platform
from quire.platforms.cpu import CPUPlatform
from quire.platforms.cuda import CUDAPlatform

__all__ = ["Platform", "select_platform"]

_PLATFORMS: dict[str, type[Platform]] = {"cpu": CPUPlatform, "cuda": CUDAPlatform}


def select_platform(name: str) -> Platform:
    """Raises ConfigError for a name that is none of the platforms'."""
    if name not in _PLATFORMS:
        raise ConfigError(f"device must be one of {', '.join(_PLATFORMS)}, got {name!r}", "device")
    return _PLATFORMS[name]()
