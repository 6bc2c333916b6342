"""Prompts of a file over replicas of a Ray cluster on this machine, some of which are killed: rows a second, and
whether each row was answered once.

    python -m benchmarks.scale.ray_files [--rows 100000] [--replicas 2] [--kills 2] [--tokens 1] [--write]
    python -m benchmarks.scale.ray_files --shape llama-3.1-8b --replicas 4 --rows 6144 --rows-per-shard 512 --tokens 128
                                         --kills 0 --write

The demo model on CPU, or --shape: random weights and prompts of `--prompt` token ids, a GPU a replica. Seconds are
those of the whole call, the starts of the engines too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks import results_file, workloads
from benchmarks.results_file import Row
from benchmarks.serve import device_name
from quire import SamplingParams
from quire.executor.ray import import_ray
from quire.ray import answer_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = {"rows": 100_000, "replicas": 2, "kills": 2, "tokens": 1, "rows-per-shard": 1000, "prompt": 256}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--shape", choices=list(workloads.MODELS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    arguments = parser.parse_args()
    ray, gpus = import_ray(), arguments.replicas if arguments.shape else 0
    ray.init(
        address="local", num_cpus=arguments.replicas, num_gpus=gpus, include_dashboard=False, logging_level="error"
    )
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "in.jsonl", Path(folder) / "out"
        engine: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_num_seqs": 128}
        if arguments.shape:
            model = workloads.write_model_dir(arguments.shape, Path(folder) / arguments.shape, tokenizer=True)
            engine = {"model": str(model), "load_format": "dummy", "num_gpus": 1}
        with given.open("w") as file:
            dice = random.Random(0)
            for i in range(arguments.rows):
                prompt = workloads.token_ids(dice, arguments.prompt) if arguments.shape else f"{i} is"
                file.write(json.dumps({"id": i, "prompt": prompt}) + "\n")
        killed: list[int] = []
        threading.Thread(target=kill, args=(out, arguments, killed), daemon=True).start()
        began = time.perf_counter()
        params = SamplingParams(max_tokens=arguments.tokens, temperature=0, ignore_eos=arguments.shape is not None)
        summary = answer_files(
            str(given), str(out), replicas=arguments.replicas, rows_per_shard=arguments.rows_per_shard,
            sampling_params=params, **engine,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for file in out.glob("part-*") for line in file.read_text().splitlines()]
    once = Counter(line["id"] for line in lines) == Counter(range(arguments.rows))
    answered = sum(line["error"] is None and line["answer"] is not None for line in lines)
    case = f"{arguments.rows} rows, {arguments.replicas} replicas, {len(killed)} killed"
    figures = [("rows_s", arguments.rows / seconds, "rows/s"), ("answered", answered, "rows")]
    figures.append(("each row once", float(once), ""))
    rows = [Row("ray_files", arguments.shape or "quire-demo", case, *figure) for figure in figures]
    for row in rows:
        print(f"{row.case:50s} {row.metric:15s} {row.value:12.1f} {row.unit}")
    print(summary)
    if arguments.write:
        command = f"python -m benchmarks.scale.ray_files {' '.join(sys.argv[1:])}"
        device = device_name() if arguments.shape else f"cpu {os.cpu_count()} threads"
        settings = {name: value for name, value in vars(arguments).items() if name not in ("write", "out")}
        print(results_file.write(rows, device, command, settings, arguments.out, "ray-files"))


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
