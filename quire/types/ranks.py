"""The processes that share one model, as their parent names them."""

from __future__ import annotations

import msgspec


class Rank(msgspec.Struct, frozen=True):
    """One of `size` workers that run every plan together.

    Layers are dealt to `stages` of workers, one behind the other. A stage is `contexts` groups, each of which holds all
    of its layers and computes a part of long prompts; those of a group hold a part of each layer.
    """

    index: int = 0
    size: int = 1
    meeting: str = ""  # path of a file that only this user can reach, or tcp://host:port, where they find each other
    stages: int = 1
    device: int = -1  # of its machine; -1: the one of its number
    contexts: int = 1

    @property
    def place(self) -> int:
        """The device of its machine that it has."""
        return self.index if self.device < 0 else self.device

    @property
    def width(self) -> int:
        """Workers that share a layer."""
        return self.size // (self.stages * self.contexts)

    @property
    def stage(self) -> int:
        return self.index // (self.width * self.contexts)

    @property
    def context(self) -> int:
        """Which of its stage's groups it is in."""
        return self.index // self.width % self.contexts

    @property
    def lane(self) -> int:
        """Which of its group's it is."""
        return self.index % self.width

    @property
    def samples(self) -> bool:
        """Whether this is the one that samples, and whose results count: the first of the last stage."""
        return self.index == self.size - self.width * self.contexts


ALONE = Rank()
