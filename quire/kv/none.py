"""Layers that keep nothing: encoders. A request holds one block as long as its longest prompt, without a byte behind
it, so that it is counted like any other."""

from __future__ import annotations

from quire.kv.group import BlockNames
from quire.types.kv import KVGroupSpec


class Nothing:
    def __init__(self, spec: KVGroupSpec, names: BlockNames) -> None:  # noqa: ARG002
        self.spec = spec

    def first_needed(self, num_computed: int) -> int:  # noqa: ARG002
        return 0
