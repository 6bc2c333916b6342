"""PlanBuilder: collects the rows of a step and lays them out as a StepPlan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.kv.block_pool import Block
from quire.kv.snapshots import Copies
from quire.scheduling.request import Request
from quire.scheduling.seats import DecodeRows
from quire.scheduling.state import Chunk
from quire.types.plan import (
    AdapterInSlot,
    Admit,
    Attachment,
    AwaitMasks,
    NewBlocks,
    PageCopies,
    Pool,
    PromptEmbeds,
    PromptLogprobs,
    SharedPrefixes,
    StepPlan,
)

_EMPTY = np.zeros(0, np.int32)
_NO_BLOCKS = NewBlocks(_EMPTY, _EMPTY, _EMPTY)
NO_ROWS = DecodeRows(_EMPTY, [], [], [], None, [], [])


class PlanBuilder:
    """num_groups: KV groups; budget: tokens that may still be added."""

    def __init__(self, num_groups: int, budget: int) -> None:
        self.budget = budget
        self.allowance: float | None = None  # work on prompts that may still be added, see PrefillBudget; None: any
        self.decodes = NO_ROWS
        self.chunks: list[Chunk] = []
        self.admits: list[Admit] = []
        self.max_seq_len = 0
        self.num_drafts = 0  # most that a decode row brings
        self.bound: list[tuple[int, Request]] = []  # rows that sample something that may be bound
        self._blocks: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in range(num_groups)]

    @property
    def is_full(self) -> bool:
        return self.budget == 0 or (self.allowance is not None and self.allowance < 1)

    def add_decodes(self, rows: DecodeRows, seq_lens: np.ndarray, num_drafts: int = 0) -> None:
        """seq_lens: tokens of each row's request after the step, the one it samples last not counted; at most."""
        self.decodes, self.num_drafts = rows, num_drafts
        self.budget -= len(rows) * (1 + num_drafts)
        self.max_seq_len = max(self.max_seq_len, int(seq_lens.max()))
        for row in rows.followed:
            request = rows.requests[row]
            self._add_bound(row, request, int(seq_lens[row]) - len(request.tokens))

    def add_chunk(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.budget -= chunk.end - chunk.start
        self.max_seq_len = max(self.max_seq_len, chunk.end)
        if chunk.samples:
            self._add_bound(len(self.decodes) + len(self.chunks) - 1, chunk.request, 0)

    def _add_bound(self, row: int, request: Request, num_unseen: int) -> None:
        """num_unseen: tokens of the request that are sampled in earlier steps and not known yet."""
        if request.constraint is not None and request.constraint.may_bind(num_unseen):
            self.bound.append((row, request))

    def add_ends(self, seat: int, tables: list[list[Block]], ends: list[list[Block]]) -> None:
        """The last entries of the tables of one seat, a list a group."""
        for entries, table, blocks in zip(self._blocks, tables, ends, strict=True):
            if blocks:
                index = np.arange(len(table) - len(blocks), len(table), dtype=np.int32)
                entries.append((np.full(len(blocks), seat, np.int32), index, _ids(blocks)))

    def add_column(self, group: int, seats: np.ndarray, index: np.ndarray, blocks: list[Block]) -> None:
        """One table entry of each of many seats."""
        self._blocks[group].append((seats, index, _ids(blocks)))

    def finish(
        self,
        step: int,
        releases: list[int],
        prefixes: SharedPrefixes | None,
        adapters: Sequence[AdapterInSlot] = (),
        copies: tuple[Copies, Copies] = ([], []),
    ) -> StepPlan:
        """copies: of states, before the step and after it."""
        decodes, chunks = self.decodes, self.chunks
        num_decodes = len(decodes)
        if chunks:
            seats = np.concatenate([decodes.seats, np.array([c.request.seat for c in chunks], np.int32)])
            num_tokens = np.ones(len(seats), np.int32)
            num_tokens[num_decodes:] = [c.end - c.start for c in chunks]
            samples = np.ones(len(seats), np.bool_)
            samples[num_decodes:] = [c.samples for c in chunks]
            # Joined in a bytearray: the array shall be writable like the others.
            parts = [c.request.tokens[c.start : c.end].tobytes() for c in chunks]
            token_ids = np.frombuffer(bytearray().join(parts), np.int32)
        else:
            seats, token_ids = decodes.seats, _EMPTY
            num_tokens, samples = np.ones(num_decodes, np.int32), np.ones(num_decodes, np.bool_)
        return StepPlan(
            step=step,
            admits=self.admits,
            seats=seats,
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            token_ids=token_ids,
            samples=samples,
            blocks=[_join(entries) for entries in self._blocks],
            max_seq_len=self.max_seq_len,
            num_drafts=self.num_drafts,
            releases=releases,
            attachments=[made for make in ATTACHMENTS if (made := make(self)) is not None],
            adapters=[*adapters],
            prefixes=prefixes,
            restores=_copies(copies[0]),
            snapshots=_copies(copies[1]),
        )


def _copies(found: Copies) -> PageCopies | None:
    if not found:
        return None
    sources, targets = zip(*found, strict=True)
    return PageCopies(np.array(sources, np.int32), np.array(targets, np.int32))


def _ids(blocks: list[Block]) -> np.ndarray:
    return np.array([block.id for block in blocks], np.int32)


def _join(entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> NewBlocks:
    if not entries:
        return _NO_BLOCKS
    if len(entries) == 1:
        return NewBlocks(*entries[0])
    return NewBlocks(*(np.concatenate(column) for column in zip(*entries, strict=True)))


def prompt_logprobs(build: PlanBuilder) -> PromptLogprobs | None:
    """Rows whose prompt positions are scored, each with the prompt token after its chunk (-1: none)."""
    found = [
        (row, _next_prompt_token(request, end), request.spec.params.prompt_logprobs)
        for row, (request, start, end, _) in enumerate(build.chunks, len(build.decodes))
        if request.lacks_prompt_logprobs and start < request.num_prompt - 1
    ]
    if not found:
        return None
    rows, next_ids, counts = zip(*found, strict=True)
    return PromptLogprobs(np.array(rows, np.int32), np.array(next_ids, np.int32), np.array(counts, np.int32))


def _next_prompt_token(request: Request, position: int) -> int:
    return request.tokens[position] if position < request.num_prompt else -1


def prompt_embeds(build: PlanBuilder) -> PromptEmbeds | None:
    """Rows within prompts that are embeddings."""
    found = [
        (row, given[start:end])
        for row, (request, start, end, _) in enumerate(build.chunks, len(build.decodes))
        if (given := request.spec.prompt_embeds) is not None and start < request.num_prompt
    ]
    if not found:
        return None
    rows, values = zip(*found, strict=True)
    counts = np.array([len(part) for part in values], np.int32)
    return PromptEmbeds(np.array(rows, np.int32), counts, np.concatenate(values))


def await_masks(build: PlanBuilder) -> AwaitMasks | None:
    return AwaitMasks() if build.bound else None


def pool(build: PlanBuilder) -> Pool | None:
    """Rows of pooling requests."""
    found = [
        (row, end == request.num_prompt, wanted.head, wanted.second_text, wanted.num_keys)
        for row, (request, _, end, _) in enumerate(build.chunks, len(build.decodes))
        if (wanted := request.spec.pooling) is not None
    ]
    if not found:
        return None
    rows, ends, heads, second_texts, num_keys = zip(*found, strict=True)
    return Pool(
        rows=np.array(rows, np.int32),
        ends=np.array(ends, np.bool_),
        heads=np.array(heads, np.int32),
        second_texts=np.array(second_texts, np.int32),
        num_keys=np.array(num_keys, np.int32),
    )


ATTACHMENTS: list[Callable[[PlanBuilder], Attachment | None]] = [prompt_logprobs, prompt_embeds, await_masks, pool]
