"""Which tokens of a step this copy of the model computes, where several copies share long prompts.

Every copy plans the whole step and knows the seats, slots and history of all its tokens. What it computes is another
batch: the decode rows, as every copy does, and its two pieces of the prompt tokens, each of which is a row for every
chunk that it has tokens of. A step of few prompt tokens is computed whole, by each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from quire.attention.base import FAR, AttentionBackend
from quire.attention.context import AttentionInputs, GroupContext, LayerCache, StateCache
from quire.attention.gathered import GatheredPlan, GatheringAttention, gathered_cache, scratch_beside
from quire.distributed.contexts import Contexts
from quire.kernels.step.step import StepBuffers
from quire.models.base import GivenEmbeddings
from quire.platforms.transfers import upload
from quire.types.plan import StepPlan
from quire.worker.batch import Batch, prompt_work
from quire.worker.staging import ALIGNED


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What this copy computes of a step, and how the whole is made of all copies' parts."""

    batch: Batch  # of the own tokens, padding behind them: at least one, and on all copies as many in all
    tokens: torch.Tensor  # int32 [own tokens]: which of the step's each is, without padding
    places: torch.Tensor  # int32 [tokens of the step]: of each among the tokens of one copy after the other
    contexts: Contexts

    def caches(self, layers: Sequence[LayerCache | StateCache]) -> list[LayerCache | StateCache]:
        """layers: the caches that are kept. Layers of a kind take turns with one piece of scratch memory."""
        planes: dict[tuple[int, ...], torch.Tensor] = {}
        made: list[LayerCache | StateCache] = []
        for kept in layers:
            assert isinstance(kept, LayerCache)
            kind = (kept.k.shape[1], kept.k.shape[3], kept.v.shape[3])
            if kind not in planes:
                planes[kind] = scratch_beside(kept, self.batch.num_tokens)
            made.append(gathered_cache(kept, planes[kind]))
        return made

    def context(
        self, slots: torch.Tensor, block_size: int, backend: AttentionBackend, inputs: AttentionInputs
    ) -> GroupContext:
        """Of a group of layers. slots: of the step's tokens, in blocks of that size. inputs: of the own tokens."""
        slots = slots[: len(self.places)].long()
        lines = self.places + self.places // self.batch.num_tokens + 1  # each copy has one slot more, its first
        plan = GatheredPlan(backend.plan(inputs), lines, slots // block_size, slots % block_size)
        gathering = cast("AttentionBackend", GatheringAttention(backend, self.contexts))  # nobody plans with it
        return GroupContext(self.batch.buffers.slots, gathering, plan)

    def given(self, given: GivenEmbeddings | None) -> GivenEmbeddings | None:
        """Those of own tokens; the others go to padding, which nobody reads."""
        if given is None:
            return None
        nobody = self.batch.num_tokens - 1
        own = torch.full_like(self.places, nobody, dtype=torch.int64)
        own[self.tokens.long()] = torch.arange(len(self.tokens), device=own.device)
        return GivenEmbeddings(own[given.tokens], given.values)

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [own tokens, padding included, hidden] → [tokens of the step, hidden]"""
        return self.contexts.gather(hidden.contiguous()).flatten(0, 1).index_select(0, self.places)


class SharedPrompts:
    """num_computed: of each seat, on the host, exact. padded: the size that so many tokens are padded to."""

    def __init__(self, contexts: Contexts, num_computed: np.ndarray, padded: Callable[[int], int]) -> None:
        self._contexts, self._num_computed, self._padded = contexts, num_computed, padded

    def part(self, plan: StepPlan, batch: Batch) -> OwnPart | None:
        """None: each copy computes the whole step. batch: of all of it, with seats that are up to date."""
        prompt_tokens = len(plan.token_ids)
        if prompt_tokens < self._contexts.least_tokens:
            return None
        decodes, contexts = plan.num_decodes, self._contexts
        pieces = [range(decodes + piece.start, decodes + piece.stop) for piece in contexts.pieces(prompt_tokens)]
        size = self._padded(decodes + 2 * contexts.piece_length(prompt_tokens) + 1)
        tokens = np.concatenate([np.arange(decodes), *(np.arange(one.start, one.stop) for one in pieces)])
        slots = np.full(size, -1, dtype=np.int32)
        slots[: len(tokens)] = np.arange(1, len(tokens) + 1)
        rows = _Rows.of(plan, pieces, self._num_computed)
        arrays = [
            slots,
            tokens,
            self._places(decodes, prompt_tokens, size),
            rows.seats,
            rows.query_start,
            rows.seq_lens,
        ]
        slots_there, tokens_there, places, seats, query_start, seq_lens = _upload(arrays, batch.seats.device)
        padded = torch.nn.functional.pad(tokens_there, (0, size - len(tokens)))
        buffers = StepBuffers(
            input_ids=batch.buffers.input_ids.index_select(0, padded),
            positions=batch.buffers.positions.index_select(0, padded),
            slots=slots_there,
            seq_lens=seq_lens,
        )
        host = batch.attention.seats_host is not None
        counts = np.diff(rows.query_start)[decodes:]
        attention = replace(
            batch.attention,
            num_rows=len(rows.seats),
            num_tokens=size,
            max_query_len=int(counts.max()),
            prompts=prompt_work(counts, rows.seq_lens[decodes:]),
            is_far=rows.is_far,
            seats=seats,
            query_start=query_start,
            seq_lens=seq_lens,
            seats_host=rows.seats.tolist() if host else None,
            query_start_host=rows.query_start.tolist() if host else None,
            seq_lens_host=rows.seq_lens.tolist() if host else None,
        )
        own = replace(
            batch, num_rows=len(rows.seats), num_tokens=size, seats=seats, buffers=buffers, attention=attention
        )
        return OwnPart(own, tokens_there, places, contexts)

    def _places(self, decodes: int, prompt_tokens: int, size: int) -> np.ndarray:
        """See OwnPart. size: of each copy's part. Decode rows are the first copy's."""
        copies, length = self._contexts.size, self._contexts.piece_length(prompt_tokens)
        line = np.arange(prompt_tokens)
        piece = line // length
        is_last = piece >= copies
        copy = np.where(is_last, 2 * copies - 1 - piece, piece)
        places = copy * size + decodes + line % length + length * is_last
        return np.concatenate([np.arange(decodes), places]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of a copy's part, as `AttentionInputs` has them."""

    seats: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    is_far: bool

    @classmethod
    def of(cls, plan: StepPlan, pieces: Sequence[range], num_computed: np.ndarray) -> _Rows:
        """pieces: tokens of the step."""
        decodes = plan.num_decodes
        ends = np.cumsum(plan.num_tokens)
        starts = ends - plan.num_tokens
        found = [np.arange(decodes)]  # plan rows; then first tokens, and where they end
        begins, stops = [starts[:decodes]], [ends[:decodes]]
        for piece in pieces:
            first, last = np.maximum(starts, piece.start), np.minimum(ends, piece.stop)
            rows = np.flatnonzero(first < last)
            found.append(rows)
            begins.append(first[rows])
            stops.append(last[rows])
        rows, begin, stop = (np.concatenate(each) for each in (found, begins, stops))
        before = num_computed[plan.seats[rows]] - starts[rows]
        return cls(
            seats=plan.seats[rows].astype(np.int32),
            query_start=np.concatenate([[0], np.cumsum(stop - begin)]).astype(np.int32),
            seq_lens=(before + stop).astype(np.int32),
            is_far=bool((before + begin)[decodes:].max() >= FAR),
        )


def _upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """All in one copy, int32, each aligned."""
    starts, packed = [], 0
    for array in arrays:
        starts.append(packed)
        packed += -(-len(array) // ALIGNED) * ALIGNED
    host = torch.zeros(packed, dtype=torch.int32)
    for start, array in zip(starts, arrays, strict=True):
        host[start : start + len(array)] = torch.from_numpy(array.astype(np.int32))
    there = upload(host, device)
    return [there[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]
