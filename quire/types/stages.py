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


def split(layers: int, stages: int, counts: Sequence[int] = ()) -> list[Stage]:
    """counts: of layers, a stage each; none: as even as can be, the first and the last having the fewer, since they
    have embeddings and logits besides.

    Raises ConfigError for counts that do not make `layers`, and for more stages than layers.
    """
    if not counts:
        if stages > layers:
            raise ConfigError(
                f"pipeline_parallel_size={stages} is more than the model's {layers} layers", "pipeline_parallel_size"
            )
        even, more = divmod(layers, stages)
        inner = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage == stages - 1, stage))
        counts = [even + (inner.index(stage) < more) for stage in range(stages)]
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise ConfigError(
            f"{_OPTION} must be {stages} numbers of layers, each >= 1, that make the model's {layers}: got "
            f"{','.join(map(str, counts))}",
            _OPTION,
        )
    ends = list(accumulate(counts, initial=0))
    return [Stage(begin, end, layers) for begin, end in pairwise(ends)]
