"""Sums across ranks: our kernels against the library, by the size of the message.

    python -m benchmarks.ranks [--ranks 2] [--hidden 4096]

Each figure is µs a call inside a CUDA graph of 40, all ranks together, the median of 20 replays: `reduce_add` (which
adds the residual too) by the kernel for few rows and by the one for many, and the library's all-reduce with an addition
behind it. A step's two other meetings follow: the logits of some rows to the first rank, and its tokens to all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial as bound
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.distributed.group import Group

CALLS, REPLAYS = 40, 20
VOCAB = 128256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        _rank(args.rank, args.ranks, args.hidden, args.meeting)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.ranks", "--ranks", str(args.ranks), "--hidden", str(args.hidden)]
        children = [
            subprocess.Popen([*command, "--rank", str(rank), "--meeting", str(Path(folder) / "meeting")])
            for rank in range(args.ranks)
        ]
        codes = [child.wait() for child in children]
    sys.exit(max(codes, key=abs))


def _rank(rank: int, size: int, hidden: int, meeting: str) -> None:
    from quire.distributed.group import Group
    from quire.distributed.peer_memory import Layout
    from quire.platforms import select_platform
    from quire.types.ranks import Rank

    me = Rank(rank, size, meeting)
    group = Group(me, select_platform("cuda").set_up(None, me))
    group.share_memory(Layout(size, hidden, 2, max_rows=16384, vocab=VOCAB, logit_rows=1040))
    _sums(group, hidden)
    _ends_of_steps(group, hidden)
    group.close()
    os._exit(0)


def _sums(group: Group, hidden: int) -> None:
    import torch

    from quire.kernels.triton import across_ranks

    peers = group.peers
    _say(group, "rows", "KiB", "few", "many", "library")
    for rows in (1 << power for power in range(14)):
        partial, residual = (torch.zeros(rows, hidden, device=group.device).bfloat16() for _ in range(2))
        found: list[object] = [rows, rows * hidden * 2 // 1024]
        for reduce, name in ((across_ranks.reduce_few, "few_rows"), (across_ranks.reduce_many, "many_rows")):
            if peers is None or rows > getattr(peers.layout, name):
                found.append("-")
            else:
                found.append(round(_timed(bound(reduce, partial, residual, peers)), 2))
        found.append(round(_timed(bound(group.reduce_add, partial, residual)), 2))
        _say(group, *found)


def _ends_of_steps(group: Group, hidden: int) -> None:
    import torch

    from quire.kernels import across_ranks

    _say(group, "rows", "MiB", "logits", "library", "tokens")
    tokens = torch.zeros(1040, dtype=torch.int32, device=group.device)
    tiny = torch.zeros(1, hidden, dtype=torch.bfloat16, device=group.device)
    width = -(-VOCAB // group.topology.size)
    shared = None if group.peers is None else group.peers.logits
    for rows in (1, 16, 64, 256, 1024):
        part = torch.zeros(rows, width, device=group.device)
        out = torch.empty(rows, VOCAB, device=group.device) if shared is None else shared[:rows]

        # Ranks must meet between two of these.
        def logits(part: torch.Tensor = part, out: torch.Tensor = out) -> None:
            across_ranks.gather_columns(part, out, group)
            across_ranks.reduce_add(tiny, tiny, group)

        def first() -> None:
            across_ranks.from_first(tokens, group)
            across_ranks.reduce_add(tiny, tiny, group)

        meet = _timed(bound(across_ranks.reduce_add, tiny, tiny, group))
        library = _timed(bound(group.gather_columns, part, out))
        times = (_timed(logits) - meet, library, _timed(first) - meet)
        _say(group, rows, rows * width * 4 >> 20, *(round(time, 2) for time in times))


def _timed(body: Callable[[], object]) -> float:
    """µs a call."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(CALLS):
            body()
        graph.capture_end()
        times = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def _say(group: Group, *columns: object) -> None:
    if group.topology.rank == 0:
        print(*(f"{column:>14}" for column in columns), flush=True)


if __name__ == "__main__":
    main()
