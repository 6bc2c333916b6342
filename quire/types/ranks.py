"""The processes that share one model, as their parent names them."""

from __future__ import annotations

import msgspec


class Rank(msgspec.Struct, frozen=True):
    """One of `size` workers that hold a part of the model each and run every plan together."""

    index: int = 0
    size: int = 1
    meeting: str = ""  # path of a file, in a folder that only this user enters, through which they find each other

    @property
    def is_first(self) -> bool:
        """Whether this is the one that samples, and whose results count."""
        return self.index == 0


ALONE = Rank()
