"""StepPlan: all that a worker learns from the brain about one step. Built once, sent, never changed.

Rows come in two runs. First the *decode* rows: one token each, and its id is already on the device
(`seats.last_token`), so the plan says nothing about it. With `num_drafts` each brings as many more as the device has
drafted for it, up to that number; how many of them were right is known when the step is settled. Then the *catch-up*
rows (prompt chunks, requests resumed after preemption): their token ids travel in `token_ids`, concatenated in row
order.
Seats are 1 … max_num_seqs; seat 0 is padding. Arrays are int32 unless noted.
"""

from __future__ import annotations

import msgspec
import numpy as np

from quire.types.adapter import Adapter
from quire.types.sampling import SamplingParams


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a seat (first time, or again after a preemption)."""

    seat: int
    num_computed: int  # tokens whose KV is already there (prefix cache)
    num_prompt: int  # of the original prompt; later tokens are output (penalties, seeds and min_tokens count them)
    params: SamplingParams
    stop_token_ids: list[int]
    seed: int
    # The first num_computed tokens, for a model none of whose layers keeps every token (a group of kind "history").
    history: np.ndarray | None = None
    limit: int = 0  # tokens, prompt included, at which it ends by length; only looked at where there are drafts
    may_draft: bool = False
    adapter: int = 0  # the slot of its LoRA adapter; 0: none


class AdapterInSlot(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that the worker has on the host takes a slot on the device, 1 … max_loras, before the step."""

    slot: int
    adapter: Adapter


class NewBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Entries to write in the block tables of one KV group: `table[seats[i], index[i]] = blocks[i]`."""

    seats: np.ndarray
    index: np.ndarray
    blocks: np.ndarray


class PageCopies(msgspec.Struct, frozen=True, array_like=True):
    """Pages of states and those that become the same, a row a state [states, pages of one], in this order."""

    sources: np.ndarray
    targets: np.ndarray


class SharedPrefixes(msgspec.Struct, frozen=True, array_like=True):
    """Groups of decoding seats whose block tables begin with the same blocks: what is there need be read only once.

    Group g is `seats[starts[g] : starts[g + 1]]`; its tables agree in the first `num_tokens[g]` tokens, whole blocks
    that were all computed in earlier steps. No seat is in two groups; the groups that save the most reads come first.
    A seat that is released leaves its group.
    """

    seats: np.ndarray  # [members], group after group
    starts: np.ndarray  # [groups + 1]
    num_tokens: np.ndarray  # [groups]


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """Catch-up rows whose prompt positions are scored; `StepResult.prompt_logprobs` answers.

    A chunk over prompt positions [a, b) gives one line for each of the prompt tokens a + 1 … b, in order (the last
    prompt token at most). Token b is not among the chunk's own: it comes here, -1 where the prompt has no more.
    """

    rows: np.ndarray
    next_ids: np.ndarray
    k: np.ndarray  # so many of the likeliest tokens beside the prompt's own; -1: all


class PromptEmbeds(msgspec.Struct, frozen=True, tag="prompt_embeds"):
    """Catch-up rows whose first tokens are embeddings that came with the request, instead of their ids'."""

    rows: np.ndarray
    counts: np.ndarray  # [n] so many of the row's tokens
    values: np.ndarray  # float32 [sum of counts, hidden], row after row


class AwaitMasks(msgspec.Struct, frozen=True, tag="await_masks"):
    """The step samples when its TokenMasks have come, which take the tokens of the step before."""


class Pool(msgspec.Struct, frozen=True, tag="pool"):
    """Catch-up rows of pooling requests; `StepResult.pooled` answers."""

    rows: np.ndarray
    ends: np.ndarray  # [n] bool: the row's chunk completes its prompt
    heads: np.ndarray  # [n] WHOLE: one vector, when the row ends; else one for every token, chunk by chunk
    second_texts: np.ndarray  # [n] position in the prompt of the first token of type 1; the prompt's length: none
    num_keys: np.ndarray  # [n] leading tokens of the prompt that are attended to; its length: all


# A tagged union: one member a feature that single steps carry. Who acts on it is found by its tag
# (`worker/features/base.py`); the last two change what a step is: it stops before sampling, or samples nothing.
Attachment = PromptLogprobs | PromptEmbeds | AwaitMasks | Pool


class TokenMasks(msgspec.Struct, frozen=True):
    """What some rows of a step may sample. It follows a plan with AwaitMasks, and may name no row at all."""

    step: int
    rows: np.ndarray  # [masks] rows of the plan, rising
    bits: np.ndarray  # [masks, ceil(vocabulary / 32)]; token t is allowed if bit t % 32 of word t // 32 is set


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    admits: list[Admit]
    seats: np.ndarray  # [rows]
    num_tokens: np.ndarray  # [rows] tokens this step; 1 for decode rows, drafts not counted
    num_decodes: int  # rows [0, num_decodes) are decode rows
    token_ids: np.ndarray  # [tokens of the catch-up rows]
    samples: np.ndarray  # [rows] bool: the row reaches its last known token and samples the next
    blocks: list[NewBlocks]  # one a KV group; empty: nothing new
    max_seq_len: int  # upper bound of tokens any row attends to, its own included
    num_drafts: int = 0  # most drafts that a decode row brings; 0 where there are catch-up rows
    releases: list[int] = msgspec.field(default_factory=list)  # seats given back before this step
    attachments: list[Attachment] = msgspec.field(default_factory=list)
    adapters: list[AdapterInSlot] = msgspec.field(default_factory=list)
    prefixes: SharedPrefixes | None = None  # all groups anew; None: as they were at the step before
    restores: PageCopies | None = None  # before anything else of the step: requests go on from these states
    snapshots: PageCopies | None = None  # after its forward pass: states that the prefix cache keeps

    @property
    def num_rows(self) -> int:
        return len(self.seats)

    @property
    def awaits_masks(self) -> bool:
        return any(isinstance(attachment, AwaitMasks) for attachment in self.attachments)
