"""The library's workspaces, given back with the last engine of a process where that can harm nobody."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

DEFAULT_STREAM = 0
LEAST_WORKSPACE = 1024 * 1024  # bytes; what is smaller on our streams are counters that our kernels keep for good
_DEFAULT_POOL = (0, 0)


def clear_workspaces(streams: Collection[torch.cuda.Stream]) -> None:
    """Free the workspaces of all the process, if the allocator holds nothing else on any device.

    torch keeps one (32 MiB on an H100) for every stream that a thread has multiplied on, until all of them are freed at
    once. The next product on a stream allocates another.

    Args:
        streams: those of engines, none of which lives any more. The devices have nothing to do.
    """
    # Not public: torch's own graphs (torch._inductor.cudagraph_trees) clear them by it.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None and only_workspaces(torch.cuda.memory_snapshot(), {one.cuda_stream for one in streams}):
        clear()


def only_workspaces(segments: Sequence[Mapping[str, Any]], ours: Collection[int]) -> bool:
    """Whether the allocator holds workspaces that nobody uses, and nothing else.

    torch does not tell which blocks are workspaces, and somebody's graph would go on writing to one that is freed. So
    nothing may be held but one block on some of our streams, and one as large on the default stream. If that one is a
    tensor after all, it stays untouched: only workspaces are freed. And no graph writes to any of these: it is captured
    on a stream that is neither ours nor the default one, and its workspace is that stream's or in its own pool.

    Args:
        segments: what `torch.cuda.memory_snapshot` returns.
        ours: handles of the streams of our engines, none of which lives any more.
    """
    sizes: dict[tuple[int, int], int] = {}  # by device and stream
    for segment in segments:
        where = segment["device"], segment["stream"]
        least = LEAST_WORKSPACE if where[1] in ours else 0
        held = [block for block in segment["blocks"] if block["state"] != "inactive" and block["size"] >= least]
        if not held:
            continue
        is_shared = tuple(segment.get("segment_pool_id", _DEFAULT_POOL)) == _DEFAULT_POOL
        if len(held) > 1 or where in sizes or not is_shared or where[1] not in {*ours, DEFAULT_STREAM}:
            return False
        sizes[where] = held[0].get("requested_size", held[0]["size"])
    return len(set(sizes.values())) == 1 and any(stream != DEFAULT_STREAM for _, stream in sizes)
