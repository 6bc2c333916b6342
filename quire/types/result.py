"""StepResult: what one step produced. Rows in plan order, no ids."""

from __future__ import annotations

import msgspec
import numpy as np


class LogprobRows(msgspec.Struct, frozen=True):
    """Top log-probabilities of some positions; column 0 is the sampled (or the prompt's own) token.

    `rows[i]` is the plan row that line i belongs to; a prompt chunk has several lines for one row.
    A line holds `counts[i]` valid columns.
    """

    rows: np.ndarray  # int32 [lines]
    counts: np.ndarray  # int32 [lines]
    token_ids: np.ndarray  # int32 [lines, 1 + k]
    logprobs: np.ndarray  # float32 [lines, 1 + k]
    ranks: np.ndarray  # int32 [lines], 1-based rank of column 0


class PooledRows(msgspec.Struct, frozen=True):
    """Vectors of some plan rows by one head, row after row: `counts[i]` lines of `values` belong to row `rows[i]`."""

    rows: np.ndarray  # int32 [n]
    counts: np.ndarray  # int32 [n]
    values: np.ndarray  # float32 [sum of counts, size]


class RowFailure(msgspec.Struct, frozen=True, array_like=True):
    """A plan row whose logits processor raised: its request cannot go on, its token means nothing."""

    row: int
    message: str


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    tokens: np.ndarray  # int32 [rows, 1 + k]; what lies behind a row's count is -1
    counts: np.ndarray  # int32 [rows], valid columns of `tokens`; 0: it did not sample, or was at its limit before
    logprobs: LogprobRows | None = None  # of a row with k drafts 1 + k lines, of which `counts` are valid
    # Where requests are drafted for, of each row: drafts that were compared with what was sampled, and how many of them
    # were right up to the first that was not. A step without drafts compares the one that there would have been.
    drafted: np.ndarray | None = None  # int32 [rows]
    matched: np.ndarray | None = None  # int32 [rows]
    prompt_logprobs: LogprobRows | None = None
    pooled: list[PooledRows] | None = None
    failures: list[RowFailure] = msgspec.field(default_factory=list)
    error: str | None = None  # the step failed as a whole
