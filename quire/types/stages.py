"""Which layers of a model a stage holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from quire.foundation.errors import ConfigError

_OPTION = "pipeline_parallel_layers"


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [begin, end) of `layers`."""

    begin: int
    end: int
    layers: int

    @property
    def is_first(self) -> bool:
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.layers


def split(layers: int, stages: int, counts: Sequence[int] = (), head: float = 0.0) -> list[Stage]:
    """counts: of layers, a stage each; none: so that the stage with the most work has as little as can be. head: the
    work of logits, which the last stage has besides, in layers. Of stages alike the first and the last have the fewer.

    Raises ConfigError for counts that do not make `layers`, and for more stages than layers.
    """
    if not counts:
        if stages > layers:
            raise ConfigError(
                f"pipeline_parallel_size={stages} is more than the model's {layers} layers", "pipeline_parallel_size"
            )
        counts = [1] * stages
        for _ in range(layers - stages):
            counts[_least(counts, head)] += 1
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise ConfigError(
            f"{_OPTION} must be {stages} numbers of layers, each >= 1, that make the model's {layers}: got "
            f"{','.join(map(str, counts))}",
            _OPTION,
        )
    ends = list(accumulate(counts, initial=0))
    return [Stage(begin, end, layers) for begin, end in pairwise(ends)]


def _least(counts: Sequence[int], head: float) -> int:
    """The stage with the least work."""
    last = len(counts) - 1
    return min(
        range(len(counts)), key=lambda stage: (counts[stage] + head * (stage == last), stage in (0, last), stage)
    )
