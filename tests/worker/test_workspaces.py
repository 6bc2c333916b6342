from typing import Any

import pytest

from quire.worker.workspaces import DEFAULT_STREAM, only_workspaces

MIB = 1024 * 1024
OURS, THEIRS = 7, 9  # streams
SIZE = 32 * MIB


def segment(*sizes: int, stream: int = OURS, device: int = 0, pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    blocks = [{"size": size + 512, "requested_size": size, "state": "active_allocated"} for size in sizes]
    blocks.append({"size": MIB, "requested_size": MIB, "state": "inactive"})
    return {"device": device, "stream": stream, "segment_pool_id": pool, "blocks": blocks}


@pytest.mark.parametrize(
    "segments",
    [
        [segment(SIZE)],
        [segment(SIZE), segment()],
        [segment(16 * 1024), segment(SIZE)],  # counters of our kernels
        [segment(SIZE), segment(SIZE, stream=DEFAULT_STREAM)],
        [segment(SIZE), segment(SIZE, device=1), segment(SIZE, stream=DEFAULT_STREAM, device=1)],
        [segment(SIZE), segment(stream=THEIRS), segment(pool=(0, 1))],  # what they have freed
    ],
)
def test_nothing_is_held_but_workspaces(segments: list[dict[str, Any]]) -> None:
    assert only_workspaces(segments, {OURS})


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [segment()],
        [segment(SIZE, stream=DEFAULT_STREAM)],  # no engine has multiplied
        [segment(SIZE), segment(4, stream=DEFAULT_STREAM)],  # a tensor, however small
        [segment(SIZE), segment(SIZE, 4, stream=DEFAULT_STREAM)],
        [segment(SIZE), segment(4, device=1, stream=DEFAULT_STREAM)],  # on another device
        [segment(SIZE, SIZE)],  # one that was made on our stream
        [segment(SIZE), segment(SIZE)],
        [segment(SIZE), segment(SIZE, stream=THEIRS)],  # a graph may have been captured there
        [segment(SIZE), segment(SIZE, pool=(0, 1), stream=DEFAULT_STREAM)],  # a graph is alive
        [segment(SIZE, pool=(0, 1))],
    ],
)
def test_somebody_else_may_hold_something(segments: list[dict[str, Any]]) -> None:
    assert not only_workspaces(segments, {OURS})


def test_a_tensor_whose_memory_is_still_read_is_held() -> None:
    waiting = segment(4, stream=DEFAULT_STREAM)
    waiting["blocks"][0]["state"] = "active_awaiting_free"
    assert not only_workspaces([segment(SIZE), waiting], {OURS})
