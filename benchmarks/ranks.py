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
from pathlib import Path

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
    import torch

    from quire.distributed.group import Group
    from quire.distributed.peer_memory import Layout
    from quire.kernels import across_ranks
    from quire.platforms import select_platform
    from quire.types.ranks import Rank

    me = Rank(rank, size, meeting)
    device = select_platform("cuda").set_up(None, me)
    group = Group(me, device)
    group.share_memory(Layout(size, hidden, 2, max_rows=16384, vocab=VOCAB, logit_rows=1040))
    peers = group.peers

    def timed(body: Callable[[], object]) -> float:
        """µs a call."""
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

    def say(*columns: object) -> None:
        if rank == 0:
            print(*(f"{column:>14}" for column in columns), flush=True)

    say("rows", "KiB", "few", "many", "library")
    for power in range(14):
        rows = 1 << power
        partial = torch.randn(rows, hidden, device=device).bfloat16()
        residual = torch.randn(rows, hidden, device=device).bfloat16()
        found = [rows, rows * hidden * 2 // 1024]
        for kernel in ("few", "many"):
            if peers is None or rows > getattr(peers.layout, f"{kernel}_rows"):
                found.append("-")  # type: ignore[arg-type]
                continue
            from quire.kernels.triton import across_ranks as triton_kernels

            reduce = triton_kernels.reduce_few if kernel == "few" else triton_kernels.reduce_many
            found.append(round(timed(lambda r=reduce: r(partial, residual, peers)), 2))  # type: ignore[misc, arg-type]
        found.append(round(timed(lambda: group.reduce_add(partial, residual)), 2))  # type: ignore[arg-type]
        residual.zero_()
        say(*found)
    say("rows", "MiB", "logits", "library", "tokens")
    tokens = torch.zeros(1040, dtype=torch.int32, device=device)
    tiny = torch.zeros(1, hidden, dtype=torch.bfloat16, device=device)
    for rows in (1, 16, 64, 256, 1024):
        width = -(-VOCAB // size)
        part = torch.randn(rows, width, device=device)
        out = torch.empty(rows, VOCAB, device=device) if peers is None or peers.logits is None else peers.logits[:rows]

        # Ranks must meet between two of these.
        def logits(part: torch.Tensor = part, out: torch.Tensor = out) -> None:
            across_ranks.gather_columns(part, out, group)
            across_ranks.reduce_add(tiny, tiny, group)

        def first() -> None:
            across_ranks.from_first(tokens, group)
            across_ranks.reduce_add(tiny, tiny, group)

        meet = timed(lambda: across_ranks.reduce_add(tiny, tiny, group))
        library = timed(lambda part=part, out=out: group.gather_columns(part, out))  # type: ignore[misc]
        say(rows, rows * width * 4 >> 20, *(round(x, 2) for x in (timed(logits) - meet, library, timed(first) - meet)))
    group.close()
    os._exit(0)


if __name__ == "__main__":
    main()
