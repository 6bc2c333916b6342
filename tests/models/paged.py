"""Steps over a paged cache without an engine: rows with shuffled blocks, run through a model as a worker would."""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import torch

from quire.attention.base import AttentionBackend, AttentionSpec
from quire.attention.context import AttentionInputs, GroupContext, LayerCache, StateCache, StepContext
from quire.attention.recurrent import RecurrentRows, StatePart
from quire.attention.select import select
from quire.models.base import Decoder
from quire.types.kv import KVGroupSpec
from quire.worker.batch import prompt_work


class PagedRows:
    """Requests that sit in seats 1, 2, … of a small paged cache; `step` runs the next tokens of some of them."""

    def __init__(
        self,
        model: Decoder,
        *,
        max_rows: int = 4,
        max_seq_len: int = 128,
        block_size: int = 4,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        weight = next(model.parameters())
        self.model, self.device, self.block_size = model, weight.device, block_size
        groups = model.kv_groups(block_size)
        blocks_a_row = -(-max_seq_len // block_size)
        num_blocks = max_rows * blocks_a_row + 1
        ids = list(range(1, num_blocks))
        random.Random(seed).shuffle(ids)
        self.block_table = torch.zeros(max_rows + 1, blocks_a_row, dtype=torch.int32)
        self.block_table[1:] = torch.tensor(ids, dtype=torch.int32).view(max_rows, blocks_a_row)
        self._table_on_device = self.block_table.to(self.device)
        self.lengths = [0] * (max_rows + 1)
        # Poison, but for the null block: what was never written must never be seen.
        states = iter(model.layer_states)
        self.caches = [
            self._state(next(states), num_blocks)
            if groups[group].kind == "state"
            else self._keys(groups[group], num_blocks, weight.dtype)
            for group in model.layer_groups
        ]
        # All groups share one table here, where a state's one page is the first; a real worker has one for each.
        self.backends: list[AttentionBackend | RecurrentRows] = [
            RecurrentRows()
            if group.kind == "state"
            else select(
                backend,
                AttentionSpec(
                    num_heads=model.num_heads,
                    num_kv_heads=group.num_kv_heads,
                    head_dim=group.head_dim,
                    block_size=block_size,
                    dtype=weight.dtype,
                    kv_dtype=weight.dtype,
                    device=self.device,
                    max_rows=max_rows,
                    max_tokens=max_rows * max_seq_len,
                    max_seq_len=max_seq_len,
                    scores=scores,
                    value_dim=group.value_dim,
                    made=made,
                ),
            )
            for group, scores, made in zip(groups, model.scores, model.made, strict=True)
        ]

    def _keys(self, spec: KVGroupSpec, num_blocks: int, dtype: torch.dtype) -> LayerCache:
        shape = (num_blocks, spec.num_kv_heads, self.block_size, spec.head_dim)
        own = [torch.full(shape, 1e4, dtype=dtype, device=self.device) for _ in range(spec.planes)]
        return LayerCache(own[0], own[0][..., : spec.value_dim] if spec.value_dim else own[1])

    def _state(self, parts: tuple[StatePart, ...], num_blocks: int) -> StateCache:
        made = (torch.full((num_blocks, *part.shape), 1e4, dtype=part.dtype, device=self.device) for part in parts)
        return StateCache(0, tuple(made))

    def context(self, seats: list[int], counts: list[int]) -> StepContext:
        """The step in which the rows in `seats` bring `counts` tokens each; rows of one token first."""
        num_decodes = next((i for i, count in enumerate(counts) if count > 1), len(counts))
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        lengths = [self.lengths[seat] + count for seat, count in zip(seats, counts, strict=True)]
        positions, slots = [], []
        for seat, count in zip(seats, counts, strict=True):
            for position in range(self.lengths[seat], self.lengths[seat] + count):
                block = int(self.block_table[seat, position // self.block_size])
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
        on_cpu = self.device.type == "cpu"
        inputs = AttentionInputs(
            num_rows=len(seats),
            num_tokens=starts[-1],
            num_decodes=num_decodes,
            max_query_len=max(counts[num_decodes:], default=0),
            max_seq_len=max(lengths),
            seats=self._ints(seats),
            query_start=self._ints(starts),
            seq_lens=self._ints(lengths),
            block_table=self._table_on_device,
            prompts=prompt_work(np.array(counts[num_decodes:]), np.array(lengths[num_decodes:])),
            seats_host=seats if on_cpu else None,
            query_start_host=starts if on_cpu else None,
            seq_lens_host=lengths if on_cpu else None,
        )
        where = self._ints(slots)
        contexts = [
            GroupContext(where, cast("AttentionBackend", backend), backend.plan(inputs), inputs)
            for backend in self.backends
        ]
        return StepContext(self._ints(positions), self.caches, contexts)

    def step(self, seats: list[int], tokens: list[list[int]]) -> list[torch.Tensor]:
        """Run the rows' next tokens; returns their logits, float32 [tokens of the row, vocab] each, on the CPU."""
        counts = [len(ids) for ids in tokens]
        ctx = self.context(seats, counts)
        with torch.inference_mode():
            hidden = self.model(self._ints([i for ids in tokens for i in ids]), ctx)
            logits = self.model.logits(hidden).cpu()
        for seat, count in zip(seats, counts, strict=True):
            self.lengths[seat] += count
        return list(logits.split(counts))

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
