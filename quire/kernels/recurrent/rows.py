"""The rows of a step as layers with states see them, and how prompt chunks are cut for scans.

All of it is found on the device from what attention knows of a step, in shapes that follow from numbers of rows and
tokens: fit for a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 64  # tokens that a scan takes at once


@dataclass(frozen=True, slots=True)
class Chunks:
    """Rows of several tokens, cut into pieces of up to CHUNK: [pieces], at least one more than there are; those too
    many have no tokens."""

    row: torch.Tensor  # int64
    start: torch.Tensor  # int64, the first token
    length: torch.Tensor  # int64, tokens
    first: torch.Tensor  # int64 [rows + 1], the first piece of each row
    most: int  # pieces of any row


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [0, num_decodes) have one token each, in the first places; the others 0 or more, up to `max_query_len`.

    A row of the null block, or without tokens, is nobody's: it neither reads a state nor writes one. A row that has its
    request's first token begins at zero, whatever lies in its pages.
    """

    num_rows: int
    num_tokens: int
    num_decodes: int
    max_query_len: int  # of the rows that are not decodes; 0 if there are none
    query_start: torch.Tensor  # int32 [rows + 1]
    pages: torch.Tensor  # int32 [rows, pages of a request's state]
    is_live: torch.Tensor  # bool [rows]
    goes_on: torch.Tensor  # bool [rows]: there is a state from before
    chunks: Chunks | None  # None: there are decode rows alone

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each row, int32 [rows]."""
        return self.query_start[1:] - self.query_start[:-1]

    @property
    def row_of_token(self) -> torch.Tensor:
        """int64 [tokens]; padding behind the last row counts as its. For plain torch: kernels know their rows."""
        token = torch.arange(self.num_tokens, dtype=self.query_start.dtype, device=self.query_start.device)
        return torch.searchsorted(self.query_start[1:].contiguous(), token, right=True).clamp_(max=self.num_rows - 1)


def make_rows(
    num_tokens: int,
    num_decodes: int,
    max_query_len: int,
    seats: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
) -> Rows:
    """Of a step. table: [seats, pages of a state]; the others as `AttentionInputs` has them."""
    rows = len(seats)
    pages = table.index_select(0, seats)
    lengths: torch.Tensor | int = 1
    is_live, chunks = pages[:, 0] > 0, None
    if num_decodes < rows:
        lengths = query_start[1:] - query_start[:-1]
        is_live &= lengths > 0
        chunks = _cut(num_tokens - num_decodes, num_decodes, max_query_len, query_start)
    return Rows(
        num_rows=rows,
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        query_start=query_start,
        pages=pages,
        is_live=is_live,
        goes_on=is_live & (seq_lens > lengths),
        chunks=chunks,
    )


def _cut(num_tokens: int, num_decodes: int, max_query_len: int, query_start: torch.Tensor) -> Chunks:
    """num_tokens: of the rows from `num_decodes` on, padding included."""
    starts = query_start.long()
    lengths = starts[1:] - starts[:-1]
    counts = (lengths + CHUNK - 1) // CHUNK
    counts[:num_decodes] = 0
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    rows = len(lengths)
    piece = torch.arange(num_tokens // CHUNK + rows - num_decodes + 1, device=starts.device)
    row = torch.searchsorted(first[1:].contiguous(), piece, right=True).clamp_(max=rows - 1)
    done = (piece - first[row]) * CHUNK
    length = (lengths[row] - done).clamp_(0, CHUNK) * (piece < first[-1])
    return Chunks(row, starts[row] + done, length, first, -(-max_query_len // CHUNK))
