"""What an engine shows of itself to whoever looks in: its latest steps, its requests, its blocks, a request's life."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

SEATED, CHUNK, PREEMPTED, ENDED = "seated", "chunk", "preempted", "ended"


class StepView(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step as it was measured. Times in seconds."""

    step: int
    ended: float  # time.time() when its result was read
    seconds: float  # that it took the device, as far as the core can tell
    gap: float  # before it, in which the device had nothing of ours to do though there was work
    predicted: float  # of `seconds`, when it was planned
    prompt_tokens: int
    decodes: int  # rows with one token each
    drafts: int  # most that such a row brought
    waiting: int  # requests, when it was settled
    running: int


class LifeEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """at: time.time(). seated: with `first` tokens found in the cache, of `last`; chunk: tokens [first, last) of it are
    planned; preempted: with `first` tokens known; ended: with `first` tokens."""

    at: float
    what: str
    first: int
    last: int = 0


class RequestView(msgspec.Struct, frozen=True, array_like=True):
    """A request that has not ended. Its number in the list is its number in BlockCells."""

    id: str
    status: str  # waiting | running | preempted | compiling
    prompt: int  # tokens
    output: int  # tokens known
    computed: int  # tokens whose KV is there, or planned
    cached: int  # of the prompt, found in the prefix cache
    preemptions: int
    blocks: int
    arrival: float  # time.time()
    priority: int
    adapter: str | None


class BlockCells(msgspec.Struct, frozen=True):
    """The KV blocks in order, `per_cell` of them a cell; a list a property, a number a cell."""

    num_blocks: int
    per_cell: int
    owner: list[int]  # who holds its first held block: a number in the list of requests; -1: nobody in that list
    held: list[int]  # blocks that requests hold
    shared: list[int]  # of these, by several
    cached: list[int]  # free, and found again if somebody asks for what they hold


class EngineView(msgspec.Struct, frozen=True):
    """Of one core."""

    now: float  # time.time(); no step that is told ended later, and none that is not told yet ended before
    steps: list[StepView]
    requests: list[RequestView]
    num_requests: int  # those that are not listed included
    cells: BlockCells
    seconds: float  # that it took to look
    engine: int = 0  # the core's number, where there are several


class StepWork(NamedTuple):
    """What a step was made of, in tokens."""

    tokens: int  # computed
    samples: int  # rows that were sampled
    read: int  # whose KV was read, summed over rows
    attended: float  # pairs of tokens, one of them computed
