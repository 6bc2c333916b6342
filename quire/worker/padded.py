"""Steps with prompt chunks in the layout of a graph: every array at one place, every size one of few."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.attention.base import SharedPrefix, prefix_tiles
from quire.attention.context import AttentionInputs
from quire.kernels.step.step import StepBuffers, gather
from quire.types.plan import StepPlan
from quire.worker.batch import Batch, whole_prompts
from quire.worker.mixed_graphs import MAX_PROMPTS, MixedSize
from quire.worker.prefixes import PrefixLayout
from quire.worker.seats import DeviceSeats
from quire.worker.staging import ALIGNED, Staging


@dataclass(frozen=True, slots=True)
class _Sections:
    """Places in one int32 array, each aligned; token ids last, since they alone vary much in number."""

    seats: slice  # [rows]
    query_start: slice  # [rows + 1]
    sample_rows: slice  # [rows]
    logit_tokens: slice  # [rows]
    sample_index: slice  # [rows]
    tokens_of_row: slice  # [decodes]; this and the next two are a SharedPrefix
    members: slice  # [decodes]
    tiles: slice  # [tiles * 4]
    token_ids: slice

    @classmethod
    def of(cls, rows: int, decodes: int, tiles: int, tokens: int) -> _Sections:
        """For at most so many of each; decodes, tiles: of steps that share prefixes."""
        sections, start = [], 0
        for length in (rows, rows + 1, rows, rows, rows, decodes, decodes, 4 * tiles, tokens):
            sections.append(slice(start, start + length))
            start = -(-(start + length) // ALIGNED) * ALIGNED
        return cls(*sections)


class PaddedSteps:
    """Owns the memory that mixed graphs read, and fills it: one copy from the host, one on the device.

    Rows of a size: padding decode rows (seat 0), the plan's rows, empty rows (seat 0, no tokens). So plan row i is
    row `first + i`. Tokens behind the last prompt chunk are padding too, see `kernels/step/step.py`.
    """

    def __init__(
        self, seats: DeviceSeats, sizes: list[MixedSize], query_group: int, max_seq_len: int, device: torch.device
    ) -> None:
        """query_group: query heads a KV head."""
        rows, tokens = max(size.rows for size in sizes), max(size.tokens for size in sizes)
        sharing = max((size.decodes for size in sizes if size.shares_prefix), default=0)
        self.sizes = sizes
        self._seats = seats
        self._max_seq_len = max_seq_len
        self._query_group = query_group
        self._sections = _Sections.of(rows, sharing, prefix_tiles(sharing, query_group), tokens)
        self._host = np.zeros(self._sections.token_ids.stop, dtype=np.int32)
        # One token a row: a step that any size has room for, until `fill` says otherwise.
        self._host[self._sections.query_start] = np.arange(rows + 1)
        self._device = torch.tensor(self._host, device=device)
        self._buffers = StepBuffers(
            *(torch.zeros(n, dtype=torch.int32, device=device) for n in (tokens, tokens, tokens, rows))
        )
        self._views = {size: self._view(size) for size in sizes}

    def _view(self, size: MixedSize) -> Batch:
        at, rows = self._sections, size.rows
        seats, query_start = self._device[at.seats][:rows], self._device[at.query_start][: rows + 1]
        whole = self._buffers
        buffers = StepBuffers(
            input_ids=whole.input_ids[: size.tokens],
            positions=whole.positions[: size.tokens],
            slots=whole.slots[: size.tokens],
            seq_lens=whole.seq_lens[:rows],
        )
        return Batch(
            num_rows=rows,
            num_tokens=size.tokens,
            seats=seats,
            buffers=buffers,
            attention=AttentionInputs(
                num_rows=rows,
                num_tokens=size.tokens,
                num_decodes=size.decodes,
                max_query_len=size.tokens - size.decodes,
                max_seq_len=self._max_seq_len,
                seats=seats,
                query_start=query_start,
                seq_lens=buffers.seq_lens,
                block_table=self._seats.state.block_table,
                prompts=whole_prompts(size.tokens - size.decodes, MAX_PROMPTS) if size.whole else None,
                prefix=self._shared_prefix(size) if size.shares_prefix else None,
            ),
            sample_rows=self._device[at.sample_rows][:rows],
            logit_tokens=self._device[at.logit_tokens][:rows],
            sample_index=self._device[at.sample_index][:rows],
            sample_rows_np=np.zeros(0, dtype=np.int32),
        )

    def _shared_prefix(self, size: MixedSize) -> SharedPrefix:
        at = self._sections
        return SharedPrefix(
            tokens_of_row=self._device[at.tokens_of_row][: size.decodes],
            members=self._device[at.members][: size.decodes],
            tiles=self._device[at.tiles].view(-1, 4)[: prefix_tiles(size.decodes, self._query_group)],
        )

    def view(self, size: MixedSize) -> Batch:
        """The batch as graphs see it: as many samples as rows, those that nobody wants of row 0."""
        return self._views[size]

    def gather(self, size: MixedSize) -> None:
        """Fill the batch's buffers from the seats; part of the graph."""
        batch = self._views[size]
        inputs, token_ids = batch.attention, self._device[self._sections.token_ids]
        gather(
            self._seats.state, batch.buffers, batch.seats, inputs.query_start, token_ids, size.decodes,
            inputs.max_query_len,
        )  # fmt: skip

    def fill(self, plan: StepPlan, layout: PrefixLayout | None, size: MixedSize, staging: Staging) -> tuple[Batch, int]:
        """Bring the plan to the device. Returns the batch, with only the samples that are due, and `first`."""
        host, at = self._host, self._sections
        first = size.decodes - plan.num_decodes
        end = first + plan.num_rows
        seats = host[at.seats][: size.rows]
        seats[:first], seats[first:end], seats[end:] = 0, plan.seats, 0
        query_start = host[at.query_start][: size.rows + 1]
        query_start[: size.decodes + 1] = np.arange(size.decodes + 1)
        np.cumsum(plan.num_tokens[plan.num_decodes :], out=query_start[size.decodes + 1 : end + 1])
        query_start[size.decodes + 1 : end + 1] += size.decodes
        query_start[end + 1 :] = query_start[end]
        due = np.flatnonzero(plan.samples).astype(np.int32)
        rows = due + first
        for section, values in ((at.sample_rows, rows), (at.logit_tokens, query_start[1:][rows] - 1)):
            host[section][: len(due)] = values
            host[section][len(due) : size.rows] = 0
        sample_index = host[at.sample_index][: size.rows]
        sample_index[:] = -1
        sample_index[rows] = np.arange(len(due))
        if layout is not None:
            host[at.tokens_of_row][:first] = 0
            host[at.tokens_of_row][first : size.decodes] = layout.tokens_of_row
            host[at.members][: len(layout.members)] = layout.members + first
            tiles = layout.tiles.reshape(-1)
            host[at.tiles][: len(tiles)], host[at.tiles][len(tiles) :] = tiles, 0
        used = at.token_ids.start + len(plan.token_ids)
        host[at.token_ids.start : used] = plan.token_ids

        writes = self._seats.stage(plan, staging)
        if staging.room < used:
            staging.send()
            self._seats.apply(writes, staging)
            writes = []
        span = staging.put(host[:used])
        staging.send()
        self._seats.apply(writes, staging)
        self._device[:used].copy_(staging.view(span))
        batch = self._views[size]
        assert batch.sample_rows is not None
        return replace(batch, sample_rows=batch.sample_rows[: len(due)], sample_rows_np=due), first
