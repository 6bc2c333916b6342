"""T1 … T4 and T6 on one GPU, or on several that share a model, written to benchmarks/results/; each model in
processes of its own.

    python -m benchmarks.gpu [--models qwen3-0.6b llama-3.1-8b] [--tests T1 T1b T2 T3 T4 T6] [--quantization fp8]
                             [--options '{"tensor_parallel_size": 2}'] [--out FOLDER]

A quantized model is a model of its own: "llama-3.1-8b+fp8", "+int4", "+int8", "+fp8_block", which --models takes too;
"+fp8kv" keeps keys and values in 8 bits, "llama-3.1-8b+fp8+fp8kv", and "+state16" states of scans in 16 bits.
The first process of a model starts with empty kernel caches: its first token is T6 "cold"; a second process gives
T6 "warm". How each test is clocked is said in `gpu_child.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import peers, results_file
from benchmarks.results_file import Row

TESTS = ["T1", "T1b", "T2", "T3", "T4", "T6"]


def run_child(
    model: str, tests: list[str], cache: Path, options: str, timeout: float
) -> tuple[list[Row], dict[str, object]]:
    """Rows of one process, and what it said of itself. Its T6 row counts from just before it was started."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "QUIRE_CACHE_DIR": str(cache)}
    env["BENCH_STARTED"] = repr(time.time())
    command = [sys.executable, "-m", "benchmarks.gpu_child", model, options, *tests]
    rows: list[Row] = []
    facts: dict[str, object] = {}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        ends = time.time() + timeout
        for line in child.stdout:
            if line.startswith("ROW "):
                rows.append(Row(**json.loads(line[4:])))
            elif line.startswith("FACTS "):
                facts = json.loads(line[6:])
            print(line, end="", flush=True)
            if time.time() > ends:
                child.kill()
    if facts.get("device") == peers.DEVICE:
        for row in rows:
            row.peer = peers.best(row.test, row.model, row.case, row.metric)
    if child.returncode:
        print(f"{model}: the process ended with code {child.returncode}", flush=True)
    return rows, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"])
    cases = 'of T1 T1b T2 T3 T4 T6; "T2=1,16", "T2@32768=1,8", "T3@131000"'
    parser.add_argument("--tests", nargs="+", default=TESTS, help=cases)
    parser.add_argument("--quantization", help="of all models: see the option of that name")
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    parser.add_argument("--options", default="{}", help="engine options as a JSON object")
    parser.add_argument("--timeout", type=float, default=240, help="seconds a process may take")
    args = parser.parse_args()
    rows: list[Row] = []
    settings: dict[str, object] = {"options": json.loads(args.options)}
    device = "gpu"
    suffix = f"+{args.quantization}" if args.quantization else ""
    for model in [f"{name}{suffix}" for name in args.models]:
        with tempfile.TemporaryDirectory() as cache:
            tests = [t for t in args.tests if t != "T6"]
            first = ["T6=cold"] if "T6" in args.tests else []
            found, facts = run_child(model, first + tests, Path(cache), args.options, args.timeout)
            rows += found
            if "T6" in args.tests:
                found, _ = run_child(model, ["T6=warm"], Path(cache), args.options, args.timeout)
                rows += found
        settings[model] = facts
        device = str(facts.get("device", device))
        path = results_file.write(
            rows, device, " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]), settings, args.out
        )
    print(results_file.table(rows))
    print(path)


if __name__ == "__main__":
    main()
