"""X-data-parallel-rank: a client says which of several engine cores answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request

from quire.foundation.errors import InputError
from quire.foundation.shown import shown
from quire.frontend.inputs import check_core

if TYPE_CHECKING:
    from quire.engine.client import EngineInfo

HEADER = "X-data-parallel-rank"


def rank_of(request: Request, info: EngineInfo) -> int | None:
    """The core's number; None: whichever is best. Raises InputError naming the header."""
    given = request.headers.get(HEADER)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit()) or len(given) > 9:
        raise InputError(f"{HEADER} must be the number of an engine core, got {shown(given)}", HEADER)
    check_core(int(given), info, HEADER)
    return int(given)
