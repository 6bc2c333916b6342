"""LayerGroups: what the layers of each group must know of a step, found from the step's rows on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from quire.attention.base import FAR, AttentionBackend, AttentionInputs, ExpandingBackend, StepPlanner
from quire.attention.context import GroupContext
from quire.kernels.step.step import find_slots
from quire.worker.batch import Batch
from quire.worker.pages import Pages
from quire.worker.seats import DeviceSeats
from quire.worker.shared_prompts import OwnPart


class LayerGroups:
    """Plans what each group does, once a step. Where a group's KV goes is known from the step for the keeper's
    group, and found here for the others, in memory of their own that graphs may read.

    backends: one for each group of layers. max_tokens: of a step, padding included.
    """

    def __init__(
        self, pages: Pages, backends: list[StepPlanner], seats: DeviceSeats, max_tokens: int, device: torch.device
    ) -> None:
        self.backends = backends
        self._pages = pages
        self._seats = seats
        self._device = device
        self._slots: dict[int, torch.Tensor] = {}
        self.reserve(max_tokens)

    def reserve(self, max_tokens: int) -> None:
        """Make room for steps of so many tokens."""
        for number in range(len(self.backends)):
            if number != self._pages.keeper and self._pages.groups[number].kind != "state":
                self._slots[number] = torch.zeros(max_tokens, dtype=torch.int32, device=self._device)

    @property
    def graph_support(self) -> bool:
        return all(backend.graph_support for backend in self.backends)

    @property
    def prefix_support(self) -> bool:
        """Prefixes are those of the keeper's tables; layers with windows read their own."""
        keeper = self._pages.keeper
        return keeper < len(self.backends) and self.backends[keeper].prefix_support

    @property
    def reads_host(self) -> bool:
        return any(backend.reads_host for backend in self.backends)

    @property
    def prompt_wave(self) -> int:
        return max(backend.prompt_wave for backend in self.backends)

    @property
    def expands(self) -> bool:
        """Whether there is a kernel for prompts in the expanded form of latent attention."""
        return any(isinstance(backend, ExpandingBackend) and backend.prompt_wave for backend in self.backends)

    def contexts(self, batch: Batch, own: OwnPart | None = None) -> list[GroupContext]:
        """own: of the step what this copy of the model computes, where several share prompts; None: all."""
        made = []
        for number, planner in enumerate(self.backends):
            backend, slots = cast("AttentionBackend", planner), batch.buffers.slots
            inputs = batch.attention if own is None else own.batch.attention
            if self._pages.groups[number].kind == "state":
                inputs = replace(inputs, block_table=self._seats.tables[number].blocks, prefix=None)
            elif number != self._pages.keeper:
                slots, inputs = self._find(number, batch), self._rows(number, inputs)
            if own is None:
                single = inputs if inputs.num_queries == 1 else None
                made.append(GroupContext(slots, backend, backend.plan(inputs), single))
            else:
                made.append(own.context(slots, self._pages.kernel_block(number), backend, inputs))
        return made

    def _find(self, number: int, batch: Batch) -> torch.Tensor:
        """The slots of a group that is not the keeper's."""
        table, inputs = self._seats.tables[number], batch.attention
        slots = self._slots[number][: batch.num_tokens]
        every_row = inputs.num_decodes == inputs.num_rows
        find_slots(
            table, batch.seats, None if every_row else inputs.query_start, batch.buffers.positions,
            batch.buffers.slots, slots, inputs.max_query_len,
        )  # fmt: skip
        return slots

    def _rows(self, number: int, inputs: AttentionInputs) -> AttentionInputs:
        """The rows of such a group."""
        is_far = inputs.is_far and not 0 < self._pages.groups[number].window <= FAR
        return replace(inputs, block_table=self._seats.tables[number].blocks, prefix=None, is_far=is_far)
