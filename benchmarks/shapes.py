"""Decode steps of many shapes and batches beside their floors, written to benchmarks/results/.

    python -m benchmarks.shapes [--models qwen3-4b …] [--batches 1 2 4 …] [--every qwen3-0.6b …]

T2 (batches of 1, 8 and 64) of each model, and for models named by --every steps of each of --batches, of which none
may take more than 3 % longer than a larger one. The floor is weights and KV over the measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import gpu, results_file, workloads
from benchmarks.results_file import Row

MODELS = ["qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b", "llama-3.2-3b", "qwen3-4b", "qwen2.5-7b", "llama-3.1-8b",
          "qwen3-14b"]  # fmt: skip
BATCHES = [1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 40, 48, 56, 64, 65, 80, 96, 128, 192, 256, 384, 512, 513, 768, 1024]


def cliffs(rows: list[Row], allowed: float = 1.03) -> list[str]:
    """Batches that take longer than a larger one."""
    found = []
    times = [(int(row.case.removeprefix("batch=")), row.value) for row in rows if row.test == "steps"]
    for batch, ms in times:
        larger = [(other, its) for other, its in times if other > batch and ms > allowed * its]
        found += [f"{batch} rows take {ms:.3f} ms, {other} rows {its:.3f}" for other, its in larger]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=list(workloads.MODELS))
    parser.add_argument("--every", nargs="*", default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    parser.add_argument("--options", default="{}", help="engine options as a JSON object")
    args = parser.parse_args()
    rows: list[Row] = []
    settings: dict[str, object] = {"options": args.options}
    device = "gpu"
    with tempfile.TemporaryDirectory() as cache:
        for model in args.models:
            tests = ["T2"] + ["steps=" + ",".join(map(str, args.batches))] * (model in args.every)
            found, facts = gpu.run_child(model, tests, Path(cache), args.options, 300)
            rows += found
            settings[model] = facts
            device = str(facts.get("device", device))
            command = " ".join(["python -m benchmarks.shapes", *sys.argv[1:]])
            path = results_file.write(rows, device, command, settings, args.out, "decode-shapes")
            for line in cliffs(found):
                print(f"{model}: {line}")
    for row in rows:
        print(f"{row.model:14}{row.test:6}{row.case:12}{row.value:9.3f} ms, floor {row.floor:9.3f}: "
              f"{(row.floor or 0.0) / row.value:.2f}")  # fmt: skip
    print(path)


if __name__ == "__main__":
    main()
