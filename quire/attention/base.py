"""The contract of an attention backend: plan once a step, run once a layer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from quire.kernels.attention.latent_expanded import HeadDims, PromptWork
from quire.kernels.attention.scores import ALIKE, PLAIN, Pairs, PerHead, Scores

__all__ = [
    "ALIKE", "FAR", "PLAIN", "AttentionBackend", "AttentionInputs", "AttentionSpec", "ExpandingBackend", "HeadDims",
    "LayerCache", "Pairs", "PerHead", "PromptAttention", "PromptWork", "Scores", "SharedPrefix", "prefix_tile_rows",
    "prefix_tiles",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Shapes a backend is built for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the cache
    device: torch.device
    max_rows: int
    max_tokens: int
    max_seq_len: int
    drafted: tuple[int, int] = (0, 1)  # decode rows of the largest step with several queries a row, and how many
    scores: Scores = PLAIN  # what they get besides the scale, and which count
    planes: int = 1  # of which a cache is every so many'th block
    value_dim: int = 0  # of a latent cache, whose one row a token is the key, and its first so many numbers the value
    made: HeadDims | None = None  # what heads make of such a row

    @property
    def out_dim(self) -> int:
        """Of a head's result."""
        return self.value_dim or self.head_dim


def prefix_tile_rows(group: int) -> int:
    """Rows that a tile of a shared prefix holds for `group` query heads a KV head."""
    return (64 if group <= 16 else 128) // group


def prefix_tiles(rows: int, group: int) -> int:
    """The most tiles that groups of two and more among `rows` rows make."""
    return rows // 2 if prefix_tile_rows(group) > 2 else rows * 2 // 3


FAR = 16384  # tokens before a prompt chunk from which on attending to them is most of what a step does


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Decode rows whose first tokens lie in the same blocks, each in at most one group.

    Groups are cut into tiles of at most `prefix_tile_rows` rows. All int32 on the device, of shapes that follow from
    the number of rows (CUDA graphs). A row's newest token is never shared.
    """

    tokens_of_row: torch.Tensor  # [rows] leading tokens the row has in common with its group, whole blocks; 0: none
    members: torch.Tensor  # [rows] row numbers, tile after tile
    tiles: torch.Tensor  # [prefix_tiles, 4]: a member's seat, first place in `members`, members (0: unused), tokens


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """A step as attention sees it. All tensors live on the device, int32.

    Rows [0, num_decodes) hold `num_queries` query tokens each, the others `query_start[i+1] - query_start[i]`. Of those
    of a decode row the first sees `first_lens[i]` tokens, each other one more, up to `seq_lens[i]`.
    Row i attends to `seq_lens[i]` tokens, its own included, found through
    `block_table[seats[i], position // block_size]`. Padding rows have seat 0 and seq_len 1 (null block).
    """

    num_rows: int
    num_tokens: int
    num_decodes: int
    max_query_len: int  # of the rows that are not decodes; 0 if there are none
    max_seq_len: int  # upper bound over the rows; with graphs: the model's longest
    seats: torch.Tensor  # [rows]
    query_start: torch.Tensor  # [rows + 1]
    seq_lens: torch.Tensor  # [rows]
    block_table: torch.Tensor  # [max_seats + 1, max_blocks]
    num_queries: int = 1  # of each decode row; more than one only if there are no other rows
    first_lens: torch.Tensor | None = None  # [rows]; None: `seq_lens`, as there is one query a row
    # Of the rows that are not decodes, or more; None: nobody counted, as for graphs but those of whole prompts.
    prompts: PromptWork | None = None
    is_far: bool = False  # a row of several queries has FAR tokens and more before them; never with graphs
    prefix: SharedPrefix | None = None  # of decode rows; None: this step's kernels know of no prefixes
    # Host copies, for backends that read them; None while a graph is captured, and of rows of several queries.
    seats_host: list[int] | None = None
    query_start_host: list[int] | None = None
    seq_lens_host: list[int] | None = None

    def piece(self, first: int, last: int) -> AttentionInputs:
        """Tokens first … last - 1 alone, of rows of one query or of prompts; what is kept of those before them is in
        the cache by then. Without host copies, rows may be left that have no tokens."""
        assert self.num_queries == 1
        starts, lengths = self.query_start_host, self.seq_lens_host
        begin, end = min(first, self.num_decodes), self.num_rows
        if starts is not None:
            begin, end = bisect_right(starts, first) - 1, min(bisect_left(starts, last), end)
        query_start = self.query_start[begin : end + 1]
        decodes = max(0, min(last, self.num_decodes) - begin)
        cut = replace(
            self,
            num_rows=end - begin,
            num_tokens=last - first,
            num_decodes=decodes,
            max_query_len=min(self.max_query_len, last - first),
            seats=self.seats[begin:end],
            query_start=query_start.clamp(first, last) - first,
            seq_lens=self.seq_lens[begin:end] - query_start.clamp(min=last).diff(),
            prompts=None,
            prefix=self.prefix if decodes == self.num_decodes else None,
        )
        if self.seats_host is None or starts is None or lengths is None:
            return cut
        behind = [max(stop - last, 0) for stop in starts[begin + 1 : end + 1]]
        return replace(
            cut,
            seats_host=self.seats_host[begin:end],
            query_start_host=[min(max(start, first), last) - first for start in starts[begin : end + 1]],
            seq_lens_host=[length - later for length, later in zip(lengths[begin:end], behind, strict=True)],
        )


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV of one layer, paged: [num_blocks, kv_heads, block_size, head_dim] each, of the same strides.

    A block is contiguous. The next one follows it, or lies `AttentionSpec.planes` blocks further. Of a latent cache v
    is a view of the first columns of k.
    """

    k: torch.Tensor
    v: torch.Tensor


class StepPlanner(Protocol):
    """What the layers of a group share of a step."""

    name: str
    graph_support: bool  # steps may be captured in a CUDA graph, if they come without host copies
    reads_host: bool  # it needs the host copies of `AttentionInputs`, but for rows with drafts
    prefix_support: bool  # it makes use of `AttentionInputs.prefix`
    prompt_wave: int  # see PromptCost; if there is one, far chunks are worth an eager step

    def plan(self, inputs: AttentionInputs) -> Any:
        """Prepare a step; must not wait for the device. Its launches are captured with the step."""
        ...


class AttentionBackend(StepPlanner, Protocol):
    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        """Why this backend cannot serve `spec`; None if it can."""
        ...

    def __init__(self, spec: AttentionSpec) -> None:
        """Allocate workspaces (nothing is allocated later)."""
        ...

    def run(self, q: torch.Tensor, cache: LayerCache, plan: Any, scale: float, heads: PerHead = ALIKE) -> torch.Tensor:
        """Attend over the paged cache, causally. This step's KV is already written.

        Args:
            q: queries, row by row; query j of a row with n of them sees seq_len - n + j + 1 tokens.
            cache: of this layer.
            plan: what `plan` returned for this step.
            scale: that products of queries and keys are multiplied by.
            heads: what this layer's bring, as the spec's `scores` say that they do.

        Shapes:
            q: [tokens, heads, head_dim]. Returns [tokens, heads * out_dim].
        """
        ...


@runtime_checkable
class ExpandingBackend(Protocol):
    """One for latent rows that attends for prompts in the expanded form, where that takes less: keys and values are
    made of the rows, and queries come as they are."""

    def absorbed(self, plan: Any) -> int | None:
        """How many of the step's tokens, from the first on, are for `run`; the others are for `run_expanded`. None: all
        are for `run`."""
        ...

    def run_expanded(
        self, q: torch.Tensor, cache: LayerCache, weight: torch.Tensor, plan: Any, scale: float, out: torch.Tensor
    ) -> None:
        """Attend for the other tokens. This step's rows are already written.

        Args:
            q: queries, their rotary columns turned.
            cache: of this layer.
            weight: what makes of a row's first numbers each head's key without positions, then its value.
            plan: what `plan` returned for this step.
            scale: that products of queries and keys are multiplied by.
            out: takes the values.

        Shapes:
            q: [tokens, heads, nope + rope]. weight: [heads, nope + value, rank]. out: [tokens, heads, value].
        """
        ...


class PromptAttention(Protocol):
    """Attention within whole prompts, both ways, over the step's own keys and values: encoders."""

    name: str

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        """As `AttentionBackend`. The window of `scores` counts the tokens that a query sees to either side, its own
        included: those less than so many away."""
        ...

    def __init__(self, spec: AttentionSpec) -> None: ...

    def plan(self, lengths: np.ndarray, query_start: torch.Tensor, num_keys: np.ndarray | None = None) -> Any:
        """Prepare a step.

        Args:
            lengths: tokens of each row, on the host.
            query_start: where the rows begin, on the device.
            num_keys: leading tokens of each row that are attended to, on the host; None: all of them are.

        Shapes:
            lengths, num_keys: [rows]. query_start: [rows + 1].
        """
        ...

    def run(
        self, q: torch.Tensor, cache: LayerCache, plan: Any, scale: float, heads: PerHead | Pairs = ALIKE
    ) -> torch.Tensor:
        """Attend both ways within rows that lie one behind the other.

        Args:
            q: queries; the heads of a token are contiguous.
            cache: the step's own keys and values: block i, of one slot, is those of token i.
            plan: what `plan` returned for this step.
            scale: that products of queries and keys are multiplied by.
            heads: as in `AttentionBackend`.

        Shapes:
            q: [tokens, heads, head_dim]. Returns [tokens, heads * head_dim].
        """
        ...
