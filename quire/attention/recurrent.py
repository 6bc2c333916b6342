"""Groups of layers that keep a state instead of keys and values: what they share of a step, and where a state lies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.attention.base import AttentionInputs
from quire.kernels.recurrent.rows import Rows, make_rows

ALIGNMENT = 256  # bytes, of each part of a state


class StatePart(NamedTuple):
    """One tensor of a layer's state. of_scan: in float32, or in what `mamba_ssm_cache_dtype` says."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    of_scan: bool = True

    @property
    def num_bytes(self) -> int:
        """That it takes of a page."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class StateCache:
    """The states of one layer, of all requests: each part [pages, *shape], a view with the pages' stride.

    entry: the place in a request's table of the page that has this layer's.
    """

    entry: int
    parts: tuple[torch.Tensor, ...]


class RecurrentRows:
    """Says which pages the rows of a step have, and which of them begin anew. The layers themselves compute."""

    name = "state"
    graph_support = True
    reads_host = False
    prefix_support = False
    prompt_wave = 0

    def plan(self, inputs: AttentionInputs) -> Rows:
        if inputs.first_lens is not None:
            raise ValueError("a state takes no drafts: it cannot be taken back")
        return make_rows(
            inputs.num_tokens,
            inputs.num_decodes,
            inputs.max_query_len,
            inputs.seats,
            inputs.query_start,
            inputs.seq_lens,
            inputs.block_table,
        )
