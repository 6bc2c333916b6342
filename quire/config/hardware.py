"""A machine that a model may run on, in the numbers that decisions need: this one, or one that is thought of."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.foundation.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    device: str  # as `resolve_device` says it
    name: str
    total: int  # bytes of one device
    free: int  # bytes
    count: int = 1  # devices


def parse_bytes(text: str, option: str) -> int:
    """80GiB, 80G (the same: memory is counted in powers of two), 80GB, or bytes. Raises ConfigError for other texts."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", text, re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{option} must be a size as 80GiB, got {text!r}", option)
    number, unit, binary, is_bytes = found.groups()
    power = unit.lower() + ("i" if unit and (binary or not is_bytes) else "")
    return int(float(number) * _UNITS[power])
