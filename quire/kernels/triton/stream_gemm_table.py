from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    rows: int
    rest: int
    consumers: int
    stages: int
    blocks: int
