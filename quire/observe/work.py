"""What steps ask of a device, estimated from the model's shape: operations, bytes read and written, and the least time
that the device's measured ceilings would allow for them (`enable_mfu_metrics`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from quire.types.kv import KVGroupSpec, ModelWork, PromptCost
from quire.types.output import EngineStats
from quire.types.view import StepWork


class WorkMeter:
    """Adds up. groups: of the KV cache; windows count as if all was read, which a short one makes too much."""

    def __init__(self, work: ModelWork, cost: PromptCost, groups: Sequence[KVGroupSpec]) -> None:
        self._work = work
        self._attention = 2.0 * work.weights * (cost.attention + sum(share for _, share in cost.windows))
        self._token_bytes = sum(group.bytes_per_token for group in groups)
        self.operations = self.read_bytes = self.written_bytes = self.floor_seconds = 0.0

    def add(self, step: StepWork) -> None:
        work = self._work
        operations = 2.0 * (work.weights * step.tokens + work.head_weights * step.samples)
        operations += self._attention * step.attended
        read = work.dense_bytes + self._expert_bytes(step.tokens) + self._token_bytes * step.read
        written = self._token_bytes * step.tokens
        self.operations += operations
        self.read_bytes += read
        self.written_bytes += written
        if work.copy_rate and work.product_rate:
            self.floor_seconds += max((read + written) / work.copy_rate, operations / work.product_rate)

    def tell(self, stats: EngineStats) -> None:
        stats.operations, stats.read_bytes = self.operations, self.read_bytes
        stats.written_bytes, stats.floor_seconds = self.written_bytes, self.floor_seconds

    def _expert_bytes(self, tokens: int) -> float:
        """By the next larger number of tokens that is known."""
        known = self._work.expert_bytes
        at = bisect_left(known, (tokens, 0.0))
        return known[min(at, len(known) - 1)][1] if known else 0.0
