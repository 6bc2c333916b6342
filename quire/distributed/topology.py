"""Which part of a model this process holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.foundation.errors import ConfigError

ROUND_LINES = 16  # shares of a vocabulary begin at multiples, where kernels like to read


class Share(NamedTuple):
    """One rank's lines [begin, end) of something, and the room it has for them: as much on every rank."""

    begin: int
    end: int
    room: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Tensor parallelism: `size` ranks share every layer, this process is number `rank`.

    whole_experts: of mixtures of experts each has some, instead of a part of every one. redundant_experts: copies that
    there are of some of a layer's, on several ranks.
    """

    rank: int = 0
    size: int = 1
    whole_experts: bool = False
    redundant_experts: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"rank must be in [0, {self.size}), got {self.rank}", "tensor_parallel_size")

    def share(self, total: int, what: str) -> int:
        """How many of `total` heads, rows or columns one rank holds. Raises ConfigError if they do not divide."""
        if total % self.size:
            raise ConfigError(
                f"{what} must be a multiple of tensor_parallel_size={self.size}, got {total}", "tensor_parallel_size"
            )
        return total // self.size

    def heads(self, total: int, what: str) -> int:
        """The same, where several ranks may keep the same one: each at least one. Raises ConfigError."""
        return 1 if total < self.size and self.size % total == 0 else self.share(total, what)

    def lines(self, total: int, heads: int, what: str) -> Share:
        """Of `total` lines in equal heads, those of this rank's heads. Raises ConfigError."""
        room = self.heads(heads, what) * (total // heads)
        begin = self.rank * heads // self.size * (total // heads) if heads < self.size else self.rank * room
        return Share(begin, begin + room, room)

    def padded(self, total: int) -> Share:
        """Of any number of lines, the last rank's may be fewer than there is room for."""
        if self.size == 1:
            return Share(0, total, total)
        step = ROUND_LINES if total >= 4 * ROUND_LINES * self.size else 1
        room = -(-total // (self.size * step)) * step
        return Share(min(self.rank * room, total), min((self.rank + 1) * room, total), room)


ALONE = Topology()
