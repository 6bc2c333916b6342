"""What the scheduler shows of its requests and blocks."""

from __future__ import annotations

from quire.kv.cells import block_cells
from quire.scheduling.request import Request, Status
from quire.scheduling.state import State
from quire.types.request import BACKGROUND
from quire.types.view import BlockCells, RequestView

MAX_REQUESTS = 2048  # listed; those with seats first


def look(state: State) -> tuple[list[RequestView], BlockCells]:
    """Those that have a seat, then those that wait, by their rank; and who holds which blocks."""
    running = sorted(state.running.values(), key=_rank)
    waiting = [request for request in state.requests.values() if request.status is not Status.RUNNING]
    listed = [*running, *sorted(waiting, key=_rank)][:MAX_REQUESTS]
    return [_view(state, request) for request in listed], block_cells(state.kv, running)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _view(state: State, request: Request) -> RequestView:
    seated = request.seat != 0
    return RequestView(
        id=request.id,
        status=request.status.name.lower(),
        prompt=request.num_prompt,
        output=len(request.tokens) - request.num_prompt,
        computed=int(state.seats.num_computed[request.seat]) if seated else 0,
        cached=request.num_cached,
        preemptions=request.num_preemptions,
        blocks=state.kv.num_held(request) if seated else 0,
        arrival=request.spec.arrival,
        priority=-1 if request.rank[0] == BACKGROUND else request.rank[0],
        adapter=None if request.spec.lora is None else request.spec.lora.name,
    )
