"""Sums across ranks: our kernels against the library, by the size of the message. And whole engines on one GPU and on
several, one after another.

    python -m benchmarks.ranks [--ranks 2] [--hidden 4096] [--out FOLDER]
    python -m benchmarks.ranks --engines [--ranks 2] [--layouts one tp cp pp ep dp] [--tests T1 T1b T2 T3]
                               [--seconds 560] [--out FOLDER]

Of sums each figure is µs a call inside a CUDA graph of 40, all ranks together, the median of 20 replays: `reduce_add`
(which adds the residual too) as layers call it, by the kernels for one trip and for two, and the
library's all-reduce with an addition behind it. Beside them the sums alone that torch makes over symmetric memory, in
one and in two shots; and a layer's sum with the norm that reads it, in a kernel behind it and inside. A step's other
meetings follow: the logits of some rows to the first rank, a draw from them there ("whole"), and its tokens to all; or
instead of the three a draw by all ranks from their own logits ("apart").

Engines are those of `benchmarks.gpu`, a process each: T1 and T2 of batch 1 of llama-3.1-8b on one GPU ("one"), with
shared layers ("tp") and in stages ("pp"), T1b of it on one, in stages and by as many copies ("dp"), T3 on one, with
shared layers and with shared prompts ("cp"), and T1 of
qwen3-30b-a3b on one and with spread experts ("ep"). What was
measured is written after each engine; none is begun in the last of `--seconds` that the slowest so far took.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial as bound
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import gpu, results_file

if TYPE_CHECKING:
    import torch

    from quire.distributed.group import Group

CALLS, REPLAYS = 40, 20
VOCAB = 128256
DENSE, SPARSE = "llama-3.1-8b", "qwen3-30b-a3b"
LAYOUTS = ["one", "tp", "cp", "pp", "ep", "dp"]
TESTS = ["T1", "T1b", "T2", "T3"]
LONG = "T3@131000"
SUMS = ["ours", "once", "twice", "library", "one shot", "two shot", "norm behind", "norm inside"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--engines", action="store_true", help="whole engines instead of sums")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--models", nargs="+", default=[DENSE, SPARSE])
    parser.add_argument("--tests", nargs="+", default=TESTS, choices=[*TESTS, LONG], help="none but these")
    parser.add_argument("--seconds", type=float, default=560.0, help="that all engines together may take")
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        _rank(args)
        return
    if args.engines:
        _engines(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.ranks", "--ranks", str(args.ranks), "--hidden", str(args.hidden)]
        command += ["--out", str(args.out)]
        children = [
            subprocess.Popen([*command, "--rank", str(rank), "--meeting", str(Path(folder) / "meeting")])
            for rank in range(args.ranks)
        ]
        codes = [child.wait() for child in children]
    sys.exit(max(codes, key=abs))


def _plan(
    models: list[str], layouts: list[str], wanted: list[str], ranks: int
) -> list[tuple[str, str, dict[str, object], list[str]]]:
    """(model, layout, options, tests), in the order of use: each model on one GPU first."""
    options: dict[str, dict[str, object]] = {
        "one": {},
        "tp": {"tensor_parallel_size": ranks},
        "cp": {"prefill_context_parallel_size": ranks},
        "pp": {"pipeline_parallel_size": ranks},
        "ep": {"tensor_parallel_size": ranks, "enable_expert_parallel": True},
        "dp": {"data_parallel_size": ranks},
    }

    def of(model: str) -> list[tuple[str, str, dict[str, object], list[str]]]:
        is_sparse = "a3b" in model
        tests = {"one": ["T1"], "ep": ["T1"]}
        if not is_sparse:
            tests = {
                "one": ["T1", "T1b", "T2=1", "T3", LONG],
                "tp": ["T1", "T2=1", "T3"],
                "cp": ["T3", LONG],
                "pp": ["T1", "T1b", "T2=1"],
                "dp": ["T1b"],
            }
        tests = {layout: [test for test in of if test.partition("=")[0] in wanted] for layout, of in tests.items()}
        return [(model, layout, options[layout], of) for layout, of in tests.items() if layout in layouts and of]

    return [one for model in models for one in of(model)]


def _engines(args: argparse.Namespace) -> None:
    rows: list[results_file.Row] = []
    settings: dict[str, object] = {}
    longest, began, device, path = 0.0, time.monotonic(), "gpu", None
    command = " ".join(["python -m benchmarks.ranks", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as cache:  # of kernels, which later engines find
        for model, layout, options, tests in _plan(args.models, args.layouts, args.tests, args.ranks):
            left = args.seconds - (time.monotonic() - began)
            if left < longest:
                print(f"{model} {layout}: left out, {left:.0f} s are left", flush=True)
                continue
            before = time.monotonic()
            found, facts = gpu.run_child(model, tests, Path(cache), json.dumps(options), left)
            longest = max(longest, time.monotonic() - before)
            rows += found
            settings[f"{model} {layout}"] = {"options": options, **facts}
            device = str(facts.get("device", device))
            if rows:
                path = results_file.write(rows, device, command, settings, args.out, part="ranks")
    print(results_file.table(rows))
    print(path)


def _rank(args: argparse.Namespace) -> None:
    import torch

    from quire.distributed.group import Group
    from quire.distributed.peer_memory import Layout
    from quire.platforms import select_platform
    from quire.types.ranks import Rank

    size, hidden = args.ranks, args.hidden
    me = Rank(args.rank, size, args.meeting)
    group = Group(me, select_platform("cuda").set_up(None, me))
    group.share_memory(Layout(size, hidden, 2, max_rows=16384, vocab=VOCAB, logit_rows=1040))
    rows = [*_sums(group, hidden), *_ends_of_steps(group, hidden)]
    if args.rank == 0:
        command = " ".join(["python -m benchmarks.ranks", "--ranks", str(size), "--hidden", str(hidden)])
        print(results_file.write(rows, torch.cuda.get_device_name(), command, {}, args.out, part="sums"))
    group.close()
    os._exit(0)


def _sums(group: Group, hidden: int) -> list[results_file.Row]:
    import torch

    found: list[results_file.Row] = []
    _say(group, "rows", "KiB", *SUMS)
    for rows in (1 << power for power in range(14)):
        partial, residual = (torch.zeros(rows, hidden, device=group.device).bfloat16() for _ in range(2))
        times = {name: round(_timed(body), 2) for name, body in _ways(group, partial, residual).items()}
        _say(group, rows, rows * hidden * 2 // 1024, *(times.get(name, "-") for name in SUMS))
        case = f"tp={group.topology.size},rows={rows}"
        found += [results_file.Row("sums", f"hidden={hidden}", case, f"{n}_us", us, "us") for n, us in times.items()]
    return found


def _ways(group: Group, partial: torch.Tensor, residual: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Those of `SUMS` that so many rows can go."""
    import torch

    from quire.kernels import across_ranks as of_layers
    from quire.kernels.elementwise.norm import rms_norm
    from quire.kernels.triton import across_ranks

    norm = torch.ones_like(residual[0]), 1e-5

    def norm_behind() -> None:
        rms_norm(of_layers.reduce_add(partial, residual, group), *norm, early=True)

    found: dict[str, Callable[[], object]] = {
        "ours": bound(of_layers.reduce_add, partial, residual, group),
        "library": bound(group.reduce_add, partial, residual),
        "norm behind": norm_behind,
        "norm inside": bound(of_layers.reduce_add_norm, partial, residual, norm, group),
    }
    peers = group.peers
    if peers is not None and len(partial) <= peers.layout.once_rows:
        found["once"] = bound(across_ranks.reduce_once, partial, residual, peers)
    if peers is not None and len(partial) <= peers.layout.twice_rows:
        found["twice"] = bound(across_ranks.reduce_twice, partial, residual, peers)
    if peers is not None and len(partial) <= max(peers.layout.once_rows, peers.layout.twice_rows):
        found |= _of_torch(partial)
    return found


def _of_torch(like: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Sums over memory that torch has mapped for all ranks; none where it cannot."""
    import torch
    import torch.distributed as dist

    everybody = dist.group.WORLD
    assert everybody is not None
    try:
        import torch.distributed._symmetric_memory as symmetric

        memory = symmetric.empty(like.shape, dtype=like.dtype, device=like.device)
        symmetric.rendezvous(memory, everybody)
    except (ImportError, AttributeError, RuntimeError) as error:
        print(f"torch has no symmetric memory here: {error}", flush=True)
        return {}
    memory.zero_()
    ops = torch.ops.symm_mem
    return {
        "one shot": bound(ops.one_shot_all_reduce, memory, "sum", everybody.group_name),
        "two shot": bound(ops.two_shot_all_reduce_, memory, "sum", everybody.group_name),
    }


def _ends_of_steps(group: Group, hidden: int) -> list[results_file.Row]:
    import torch

    from quire.kernels import across_ranks

    names = ["logits", "library", "whole", "tokens", "apart"]
    _say(group, "rows", "MiB", *names)
    tokens = torch.zeros(1040, dtype=torch.int32, device=group.device)
    tiny = torch.zeros(1, hidden, dtype=torch.bfloat16, device=group.device)
    width, found = -(-VOCAB // group.topology.size), list[results_file.Row]()
    shared = None if group.peers is None else group.peers.logits
    for rows in (1, 16, 64, 256, 1024):
        part = torch.zeros(rows, width, device=group.device)
        out = torch.empty(rows, VOCAB, device=group.device) if shared is None else shared[:rows]
        own = part if shared is None else out[:, :width]  # as in an engine

        # Ranks must meet between two of these.
        def logits(own: torch.Tensor = own, out: torch.Tensor = out) -> None:
            across_ranks.gather_columns(own, out, group)
            across_ranks.reduce_add(tiny, tiny, group)

        def first() -> None:
            across_ranks.from_first(tokens, group)
            across_ranks.reduce_add(tiny, tiny, group)

        meet = _timed(bound(across_ranks.reduce_add, tiny, tiny, group))
        library = _timed(bound(group.gather_columns, part, out))
        times = {"logits": _timed(logits) - meet, "library": library, "tokens": _timed(first) - meet}
        times |= {name: _timed(body) for name, body in _draws(group, rows).items()}
        _say(group, rows, rows * width * 4 >> 20, *(round(times[name], 2) if name in times else "-" for name in names))
        case = f"tp={group.topology.size},rows={rows}"
        found += [
            results_file.Row("ends", f"vocab={VOCAB}", case, f"{what}_us", round(time, 2), "us")
            for what, time in times.items()
        ]
    return found


def _draws(group: Group, rows: int) -> dict[str, Callable[[], object]]:
    """From whole logits, wherever this rank is, and from parts, if ranks share memory; all rows at temperature 1."""
    import torch

    from quire.kernels.sampling.apart import draw_apart
    from quire.kernels.sampling.sampling import Column, sample
    from quire.kernels.sampling.state import Scratch, Stats

    peers = group.peers
    if peers is None or peers.logits is None:
        return {}
    logits, room = peers.logits[:rows], peers.topology.padded(VOCAB).room
    columns = torch.ones(rows + 1, len(Column), dtype=torch.int32, device=group.device)
    columns[:, Column.INV_TEMPERATURE] = torch.ones(1).view(torch.int32).item()
    seats = torch.arange(1, rows + 1, dtype=torch.int32, device=group.device)
    out, stats = torch.empty_like(seats), Stats.allocate(rows, room, group.device)
    scratch = Scratch.allocate(rows, 1, VOCAB, group.device)
    return {
        "whole": bound(sample, logits, columns, seats, seats, out, scratch, filtered=False),
        "apart": bound(draw_apart, logits[:, :room], columns, seats, seats, out, stats, peers),
    }


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
