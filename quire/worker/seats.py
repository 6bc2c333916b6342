"""Request rows on the device: who sits where, how far it has come, and where its KV blocks are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from quire.kernels.step.step import GroupTable, SeatState, scatter
from quire.types.plan import Admit, NewBlocks, StepPlan
from quire.worker.pages import Pages
from quire.worker.staging import Span, Staging

_LEAST_PIECE = 16  # of what is sent; for less the next copy is begun


class DeviceSeats:
    """Arrays `[max_seats + 1]`; seat 0 is padding and stays zero.

    `state` has the table of the group that keeps every token (the keeper), `tables` those of all groups.
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
        adapted: bool = False,
    ) -> None:
        """max_blocks, block_size: of the keeper, the only group unless `add_groups` is called. adapted: rows may have
        LoRA adapters."""
        seats = max_seats + 1
        self.state = SeatState(
            last_token=torch.zeros(seats, dtype=torch.int32, device=device),
            num_computed=torch.zeros(seats, dtype=torch.int32, device=device),
            block_table=torch.zeros(seats, max_blocks, dtype=torch.int32, device=device),
            token_of_slot=token_of_slot,
            block_size=block_size,
            limit=torch.zeros(seats, dtype=torch.int32, device=device) if limited else None,
        )
        self.tables = [GroupTable(self.state.block_table, block_size)]
        self.keeper, self._splits = 0, [1]
        self.num_computed_np = np.zeros(seats, dtype=np.int32)
        self.adapters = torch.zeros(seats, dtype=torch.int32, device=device) if adapted else None  # slots
        self.adapters_np = np.zeros(seats, dtype=np.int32)  # the same
        self.is_read = device.type == "cpu"  # whether somebody needs the mirror to be exact

    def add_groups(self, pages: Pages, max_model_len: int) -> None:
        """All groups, in the order of plans; the keeper's is there already."""
        shared, self.keeper, self._splits = self.tables[0], pages.keeper, pages.splits
        seats = len(self.num_computed_np)
        self.tables = []
        for number, (spec, split) in enumerate(zip(pages.groups, pages.splits, strict=True)):
            blocks = shared.blocks.new_zeros(seats, spec.num_blocks(max_model_len) * split)
            self.tables.append(shared if number == pages.keeper else GroupTable(blocks, pages.kernel_block(number)))

    def restart(self) -> None:
        """Nothing of any seat is computed. A trial step on top of another would run over the end of the block table."""
        self.num_computed_np[:] = 0
        self.state.num_computed.zero_()

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
            if self.adapters is not None:
                slots = np.array([a.adapter for a in plan.admits], dtype=np.int32)
                writes.append((self.adapters, staging.put(seats), staging.put(slots)))
        reserved = len(plan.token_ids) + 6 * plan.num_rows + 32
        for target, index, values in self._changes(plan):
            begin = 0
            while begin < len(index):
                room = staging.room // 2 - reserved
                if writes and room < min(len(index) - begin, _LEAST_PIECE):
                    staging.send()
                    self.apply(writes, staging)
                    writes = []
                    continue
                part = slice(begin, begin + max(room, 1))
                writes.append((target, staging.put(index[part]), staging.put(values[part])))
                begin = part.stop
        return writes

    def seat_adapters(self, admits: Sequence[Admit]) -> None:
        """Keep the mirror of the seats' adapters in step with what `stage` does on the device."""
        for admit in admits:
            self.adapters_np[admit.seat] = admit.adapter

    def _changes(self, plan: StepPlan) -> Iterator[tuple[torch.Tensor, np.ndarray, np.ndarray]]:
        """(array, places in it, values) of what the plan says of tables and histories."""
        for table, split, new in zip(self.tables, self._splits, plan.blocks, strict=False):
            if not len(new.seats):
                continue
            first, blocks = new.seats.astype(np.int64) * table.blocks.shape[1] + new.index * split, new.blocks
            if split > 1:  # as many blocks of kernels, one behind the other
                each = np.arange(split)
                first, blocks = (first[:, None] + each).reshape(-1), (blocks[:, None] * split + each).reshape(-1)
            yield table.blocks, first, blocks
        for admit in plan.admits:
            if admit.history is not None:
                slots = self._slots(plan.blocks[self.keeper], admit.seat, len(admit.history))
                yield self.state.token_of_slot, slots, admit.history

    def _slots(self, new: NewBlocks, seat: int, num_tokens: int) -> np.ndarray:
        """Of the first tokens of a seat that has just got its blocks in the keeper's group."""
        size, own = self.state.block_size, new.seats == seat
        blocks = np.zeros(-(-num_tokens // size), dtype=np.int64)
        there = new.index[own] < len(blocks)
        blocks[new.index[own][there]] = new.blocks[own][there]
        return (blocks[:, None] * size + np.arange(size))[: len(blocks)].reshape(-1)[:num_tokens]

    def apply(self, writes: list[tuple[torch.Tensor, Span, Span]], staging: Staging) -> None:
        for target, index, values in writes:
            scatter(target, staging.view(index), staging.view(values))

    def advance(self, seats: np.ndarray, num_tokens: np.ndarray) -> None:
        """Keep the host mirror in step with what `commit` does on the device."""
        self.num_computed_np[seats] += num_tokens

    def look(self) -> None:
        """Make the mirror exact if it is read: on a CPU that costs nothing, elsewhere it waits for the device."""
        if self.state.limit is not None and self.is_read:
            np.copyto(self.num_computed_np, self.state.num_computed.cpu().numpy())
