"""Layers that keep a state: of one size whatever the length of the request, and overwritten token by token.

A request holds the pages of its state from its first token to its end, and shares them with nobody. Whoever begins like
another goes on from a copy (`snapshots.py`).
"""

from __future__ import annotations

from quire.kv.group import BlockNames
from quire.types.kv import KVGroupSpec


class State:
    def __init__(self, spec: KVGroupSpec, names: BlockNames) -> None:  # noqa: ARG002
        self.spec = spec

    def first_needed(self, num_computed: int) -> int:  # noqa: ARG002
        return 0
