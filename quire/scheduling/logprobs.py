"""From the worker's columns of log-probabilities to lists that can be sent."""

from __future__ import annotations

from quire.types.output import TokenLogprobs
from quire.types.result import LogprobRows


def lines_by_row(found: LogprobRows | None) -> dict[int, list[TokenLogprobs]]:
    """The lines of each plan row, in order."""
    by_row: dict[int, list[TokenLogprobs]] = {}
    if found is None:
        return by_row
    columns = (found.rows, found.counts, found.token_ids, found.logprobs, found.ranks)
    for row, count, token_ids, logprobs, rank in zip(*(c.tolist() for c in columns), strict=True):
        by_row.setdefault(row, []).append(TokenLogprobs(token_ids[:count], logprobs[:count], rank))
    return by_row
