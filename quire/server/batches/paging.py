"""Pages of lists, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins

from quire.server.batches.store import BatchJob, File
from quire.server.http.errors import ApiError


def page(records: Sequence[File | BatchJob], after: str | None, limit: int, order: str = "desc") -> dict[str, Any]:
    """By time of creation; `after`: the id of the record before the page. Raises ApiError 404 if it is not there."""
    ordered = sorted(records, key=lambda r: (r.created_at, r.id), reverse=order == "desc")
    if after is not None:
        at = next((i for i, record in enumerate(ordered) if record.id == after), None)
        if at is None:
            raise ApiError(404, f"there is nothing with the id {after[:256]!r}", "after")
        ordered = ordered[at + 1 :]
    shown = ordered[:limit]
    ends = {"first_id": shown[0].id if shown else None, "last_id": shown[-1].id if shown else None}
    return {"object": "list", "data": to_builtins(shown), **ends, "has_more": len(ordered) > limit}
