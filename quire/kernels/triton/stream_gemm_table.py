from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    rows: int
    rest: int
    stages: int
    split: int
    chunk: int
    ahead: int = 0
    blocks: int = 132
