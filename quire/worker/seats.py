"""Request rows on the device: who sits where, how far it has come, and where its KV blocks are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from quire.kernels.step.step import SeatState, scatter
from quire.types.plan import StepPlan
from quire.worker.staging import Span, Staging


class DeviceSeats:
    """Arrays `[max_seats + 1]`; seat 0 is padding and stays zero.

    `num_computed_np` mirrors the device's counts: the plan determines them, so the host never asks. With `limited`,
    where rows may advance by several tokens, those of requests with drafts are lower bounds once they decode.
    """

    def __init__(
        self,
        max_seats: int,
        max_blocks: int,
        token_of_slot: torch.Tensor,
        block_size: int,
        device: torch.device,
        *,
        limited: bool = False,
    ) -> None:
        seats = max_seats + 1
        self.state = SeatState(
            last_token=torch.zeros(seats, dtype=torch.int32, device=device),
            num_computed=torch.zeros(seats, dtype=torch.int32, device=device),
            block_table=torch.zeros(seats, max_blocks, dtype=torch.int32, device=device),
            token_of_slot=token_of_slot,
            block_size=block_size,
            limit=torch.zeros(seats, dtype=torch.int32, device=device) if limited else None,
        )
        self.num_computed_np = np.zeros(seats, dtype=np.int32)

    def stage(self, plan: StepPlan, staging: Staging) -> list[tuple[torch.Tensor, Span, Span]]:
        """Put what the plan changes of the seats into the staging buffer; hand the answer to `apply` after its `send`.

        Block-table entries that would not fit (very long cached prefixes of many requests) are copied ahead.
        """
        writes = []
        if plan.admits:
            seats = np.array([a.seat for a in plan.admits], dtype=np.int32)
            computed = np.array([a.num_computed for a in plan.admits], dtype=np.int32)
            self.num_computed_np[seats] = computed
            writes.append((self.state.num_computed, staging.put(seats), staging.put(computed)))
        blocks = plan.blocks[0]
        flat = blocks.seats.astype(np.int64) * self.state.block_table.shape[1] + blocks.index
        pieces = list(_pieces(len(flat), staging.room // 2 - len(plan.token_ids) - 6 * plan.num_rows - 32))
        for number, part in enumerate(pieces, start=1):
            writes.append((self.state.block_table, staging.put(flat[part]), staging.put(blocks.blocks[part])))
            if number < len(pieces):
                staging.send()
                self.apply(writes, staging)
                writes = []
        return writes

    def apply(self, writes: list[tuple[torch.Tensor, Span, Span]], staging: Staging) -> None:
        for target, index, values in writes:
            scatter(target, staging.view(index), staging.view(values))

    def advance(self, seats: np.ndarray, num_tokens: np.ndarray) -> None:
        """Keep the host mirror in step with what `commit` does on the device."""
        self.num_computed_np[seats] += num_tokens

    def look(self) -> None:
        """Make the mirror exact, on a CPU, where that costs nothing."""
        if self.state.limit is not None and self.state.limit.device.type == "cpu":
            np.copyto(self.num_computed_np, self.state.num_computed.numpy())


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, count)) for i in range(0, count, size))
