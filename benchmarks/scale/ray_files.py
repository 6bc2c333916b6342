"""Prompts of a file over replicas of a Ray cluster on this machine, some of which are killed: rows a second, and
whether each row was answered once.

    python -m benchmarks.scale.ray_files [--rows 100000] [--replicas 2] [--kills 2] [--tokens 1] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

from benchmarks import results_file
from benchmarks.results_file import Row
from quire import SamplingParams
from quire.executor.ray import import_ray
from quire.ray import answer_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"rows": 100_000, "replicas": 2, "kills": 2, "tokens": 1, "rows-per-shard": 1000}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    import_ray().init(address="local", num_cpus=arguments.replicas, include_dashboard=False, logging_level="error")
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "in.jsonl", Path(folder) / "out"
        given.write_text("".join(json.dumps({"id": i, "prompt": f"{i} is"}) + "\n" for i in range(arguments.rows)))
        killed: list[int] = []
        threading.Thread(target=kill, args=(out, arguments, killed), daemon=True).start()
        began = time.perf_counter()
        summary = answer_files(
            str(given), str(out), replicas=arguments.replicas, rows_per_shard=arguments.rows_per_shard, device="cpu",
            num_threads=1, max_num_seqs=128, sampling_params=SamplingParams(max_tokens=arguments.tokens, temperature=0),
        )  # fmt: skip
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for file in out.glob("part-*") for line in file.read_text().splitlines()]
    once = Counter(line["id"] for line in lines) == Counter(range(arguments.rows))
    answered = sum(line["error"] is None and line["answer"] is not None for line in lines)
    case = f"{arguments.rows} rows, {arguments.replicas} replicas, {len(killed)} killed"
    rows = [
        Row("ray_files", "quire-demo", case, "rows_s", arguments.rows / seconds, "rows/s"),
        Row("ray_files", "quire-demo", case, "answered", answered, "rows"),
        Row("ray_files", "quire-demo", case, "each row once", float(once), ""),
    ]
    for row in rows:
        print(f"{row.case:50s} {row.metric:15s} {row.value:12.1f} {row.unit}")
    print(summary)
    if arguments.write:
        command = f"python -m benchmarks.scale.ray_files {' '.join(sys.argv[1:])}"
        print(results_file.write(rows, f"cpu {os.cpu_count()} threads", command, vars(arguments), part="ray-files"))


def kill(out: Path, arguments: argparse.Namespace, killed: list[int]) -> None:
    """A replica at a time, at equal distances."""
    num_shards = -(-arguments.rows // arguments.rows_per_shard)
    while len(killed) < arguments.kills:
        time.sleep(0.2)
        if len(list(out.glob("part-*"))) < (len(killed) + 1) * num_shards / (arguments.kills + 1):
            continue
        for process in psutil.process_iter(["cmdline"]):
            if "ray::Replica" in " ".join(process.info["cmdline"] or []):
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
                break


if __name__ == "__main__":
    main()
