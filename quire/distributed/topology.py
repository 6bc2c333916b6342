"""Which part of a model this process holds."""

from __future__ import annotations

from dataclasses import dataclass

from quire.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """Tensor parallelism: `size` ranks share every layer, this process is number `rank`."""

    rank: int = 0
    size: int = 1

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


ALONE = Topology()
