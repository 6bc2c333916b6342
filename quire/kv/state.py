"""Layers that keep a state: of one size whatever the length of the request, and overwritten token by token.

A request holds the pages of its state from its first token to its end. A state stands for all tokens before the next
one, so nothing of it can be shared: models with such layers have no prefix cache (`UNSHARED` in `kinds.py`).
"""

from __future__ import annotations

from quire.kv.group import BlockNames
from quire.types.kv import KVGroupSpec


class State:
    def __init__(self, spec: KVGroupSpec, names: BlockNames) -> None:  # noqa: ARG002
        self.spec = spec

    def first_needed(self, num_computed: int) -> int:  # noqa: ARG002
        return 0
