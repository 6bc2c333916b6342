"""The device arrays that sampling reads: sampling columns of all seats, token history, scratch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

CHUNK = 2048  # tokens a program reduces; the same at any batch size, so that sums always round alike
GROUP = 64  # tokens whose maximum and sum guide the search for a cut
SHORTLIST = 8192  # most tokens above a first, cheap cut that the exact search then holds at once


class Column(IntEnum):
    """Columns of the int32 matrix [max_seats + 1, len(Column)]; (f) marks float32 bits."""

    INV_TEMPERATURE = 0  # (f) 0: greedy
    TOP_K = 1  # 0: off
    TOP_P = 2  # (f) 1: off
    MIN_P_CUT = 3  # (f) temperature * log(min_p): logits below the maximum plus this are cut; -inf: off
    NUM_PROMPT = 4
    MIN_TOKENS = 5
    REPETITION = 6  # (f) 1: off
    PRESENCE = 7  # (f)
    FREQUENCY = 8  # (f)
    KEY_LOW = 9  # of the 64-bit key that the seed was hashed to
    KEY_HIGH = 10


@dataclass(frozen=True, slots=True)
class History:
    """The tokens of all requests on the device, paged like their KV.

    Token p of the request in seat s is
    `token_of_slot[block_table[s, p // block_size] * block_size + p % block_size]`.
    """

    token_of_slot: torch.Tensor  # int32 [num_blocks * block_size]
    block_table: torch.Tensor  # int32 [max_seats + 1, max_blocks]
    block_size: int

    @property
    def max_len(self) -> int:
        """Tokens the longest request can have."""
        return self.block_table.shape[1] * self.block_size

    def at(self, seats: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """seats: int64 [n]; positions: int64 [n, length], all in range. Returns int32 ids [n, length]."""
        blocks = self.block_table[seats.unsqueeze(1), positions // self.block_size].long()
        return self.token_of_slot[blocks * self.block_size + positions % self.block_size]


@dataclass(frozen=True, slots=True)
class Stats:
    """Of chunks, what a draw without filters is made by."""

    chunk_max: torch.Tensor  # float32 [rows, chunks]
    chunk_argmax: torch.Tensor  # int32 [rows, chunks]
    chunk_sum: torch.Tensor  # float32 [rows, chunks], see `Scratch`

    @staticmethod
    def allocate(rows: int, columns: int, device: torch.device) -> Stats:
        shape = rows, -(-columns // CHUNK)
        floats = torch.empty((2, *shape), dtype=torch.float32, device=device)
        return Stats(floats[0], torch.empty(shape, dtype=torch.int32, device=device), floats[1])


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where the sampling kernels meet between launches. Only GPUs need it."""

    chunk_max: torch.Tensor  # float32 [rows, chunks]
    chunk_min: torch.Tensor  # float32 [rows, chunks], of the finite logits
    chunk_argmax: torch.Tensor  # int32 [rows, chunks]
    chunk_sum: torch.Tensor  # float32 [rows, chunks], of exp((logit - chunk maximum) / temperature)
    group_max: torch.Tensor  # float32 [rows, groups]
    group_sum: torch.Tensor  # float32 [rows, groups], scaled like `chunk_sum`: relative to the chunk's maximum
    short_groups: torch.Tensor  # int32 [rows, groups]: groups that may hold a token above the first cut
    short_logits: torch.Tensor  # float32 [rows, SHORTLIST]
    short_ids: torch.Tensor  # int32 [rows, SHORTLIST]
    counts: torch.Tensor  # int32 [slice, vocab], all zero between launches: how often the history holds a token

    @staticmethod
    def allocate(max_rows: int, slice_rows: int, vocab_size: int, device: torch.device) -> Scratch:
        """slice_rows: the most rows that `penalize` sees at once."""
        chunks, groups = -(-vocab_size // CHUNK), -(-vocab_size // GROUP)

        def floats(columns: int) -> torch.Tensor:
            return torch.empty(max_rows, columns, dtype=torch.float32, device=device)

        def ints(columns: int) -> torch.Tensor:
            return torch.empty(max_rows, columns, dtype=torch.int32, device=device)

        return Scratch(
            chunk_max=floats(chunks),
            chunk_min=floats(chunks),
            chunk_argmax=ints(chunks),
            chunk_sum=floats(chunks),
            group_max=floats(groups),
            group_sum=floats(groups),
            short_groups=ints(groups),
            short_logits=floats(SHORTLIST),
            short_ids=ints(SHORTLIST),
            counts=torch.zeros(slice_rows, vocab_size, dtype=torch.int32, device=device),
        )
