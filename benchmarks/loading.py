"""How fast a checkpoint becomes weights, beside what the page cache and the bus give.

    python -m benchmarks.loading [--model llama-3.1-8b] [--out FOLDER]

Writes a checkpoint of the model's shape (zeros, shards of 4 GB) to a temporary folder, so that it lies in the page
cache, and loads it. Ceilings: the same files read by as many threads into memory of ours; the same bytes copied from
pinned memory to the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks import results_file, workloads
from benchmarks.results_file import Row
from quire.config.model_info import read_model_info
from quire.models import catalog, weights
from quire.models.transfer import CHUNK_BYTES, MAX_THREADS

SHARD_BYTES = 4 * 1000**3
REPEATS = 3


def write_checkpoint(model: str, folder: Path) -> int:
    """Returns the bytes written."""
    workloads.write_model_dir(model, folder)
    meta = catalog.build(read_model_info(folder, {}), torch.bfloat16, torch.device("meta"), 1024)
    targets = weights.parameter_targets(meta)
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = total = 0
    for target in targets:
        name, tensor = target.source, torch.zeros(target.shape, dtype=torch.bfloat16)
        size = tensor.numel() * tensor.element_size()
        if filled + size > SHARD_BYTES and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled, total = filled + size, total + size
    names = [f"model-{number:05d}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
    index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": index}))
    return total


def page_cache(folder: Path) -> None:
    """Read every file as the loader does, to memory that is thrown away."""
    buffers: dict[int, memoryview] = {}

    def read(path: Path, offset: int) -> None:
        buffer = buffers.setdefault(threading.get_ident(), memoryview(bytearray(CHUNK_BYTES)))
        with path.open("rb", buffering=0) as file:
            os.preadv(file.fileno(), [buffer], offset)

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        jobs = [
            pool.submit(read, path, offset)
            for path in sorted(folder.glob("*.safetensors"))
            for offset in range(0, path.stat().st_size, CHUNK_BYTES)
        ]
        for job in jobs:
            job.result()


def bus(total: int, device: torch.device) -> None:
    source = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)
    for _ in range(total // CHUNK_BYTES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)


def seconds(body: Callable[[], object]) -> float:
    """Median of several runs."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        body()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=workloads.MODELS)
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = write_checkpoint(args.model, folder)
        model = catalog.build(read_model_info(folder, {}), torch.bfloat16, device, 1024)
        found = {"load": seconds(lambda: weights.load(model, folder, "auto"))}
        found["page cache"] = seconds(lambda: page_cache(folder))
        if device.type == "cuda":
            found["bus"] = seconds(lambda: bus(total, device))
    rates = {case: total / spent / 1e9 for case, spent in found.items()}
    ceiling = min(rate for case, rate in rates.items() if case != "load")
    rows = [
        Row("load", args.model, case, "GB_per_s", round(rate, 2), "GB/s", round(ceiling, 2) if case == "load" else None)
        for case, rate in rates.items()
    ]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(results_file.table(rows))
    print(
        results_file.write(
            rows, where, " ".join(["python -m benchmarks.loading", *sys.argv[1:]]), {}, args.out, "loading"
        )
    )


if __name__ == "__main__":
    main()
