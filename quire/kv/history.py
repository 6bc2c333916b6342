"""The ids of a request's tokens, for models none of whose layers keep every token.

Penalties and bad words look at all of them. A block holds thousands, so none is ever shared: what a hit skips is sent
with the request's seat (`Admit.history`).
"""

from __future__ import annotations

from quire.kv.group import BlockNames
from quire.types.kv import KVGroupSpec


class History:
    def __init__(self, spec: KVGroupSpec, names: BlockNames) -> None:  # noqa: ARG002
        self.spec = spec

    def first_needed(self, num_computed: int) -> int:  # noqa: ARG002
        return 0
