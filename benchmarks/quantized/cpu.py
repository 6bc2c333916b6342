"""Products with codes on a CPU: by torch's kernels for integers, with the weight widened, and plain.

python -m benchmarks.quantized.cpu [--sizes 4096x4096] [--rows 1 16 64 256] [--write]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.results_file import Row, table, write
from quire.kernels.gemm import codes
from quire.kernels.gemm.cpu_codes import CpuProduct
from quire.quantization.grouped import Grouped, GroupedMatrix, Int4, Int8

REPEATS, LEAST_SECONDS = 3, 0.05


def seconds(product: Callable[[], object]) -> float:
    """The best of some runs, one product."""
    product()
    best = float("inf")
    for _ in range(REPEATS):
        count, began = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - began < LEAST_SECONDS:
            product()
            count += 1
        best = min(best, (time.perf_counter() - began) / count)
    return best


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["4096x4096"], help="outputs x inputs")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--write", action="store_true", help="keep the result")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for size in options.sizes:
        n, k = map(int, size.split("x"))
        rows += measure(n, k, options.rows)
    print(table(rows))
    if options.write:
        told = f"--sizes {' '.join(options.sizes)} --rows {' '.join(map(str, options.rows))}"
        command = f"python -m benchmarks.quantized.cpu {told}"
        print(write(rows, "cpu 1 thread", command, {"dtype": "bfloat16"}, part="codes"))


def measure(n: int, k: int, counts: list[int]) -> list[Row]:
    """In milliseconds."""
    dense = torch.randn(n, k, dtype=torch.bfloat16)
    forms: dict[str, Grouped] = {"int4": Int4(), "int8": Int8()}
    matrices = {name: form.matrix(form.pack(dense), None) for name, form in forms.items()}
    found = []
    for count in counts:
        x = torch.randn(count, k, dtype=torch.bfloat16)
        took = {"plain": seconds(lambda x=x: torch.nn.functional.linear(x, dense))}  # type: ignore[misc]
        for name, matrix in matrices.items():
            assert isinstance(matrix, GroupedMatrix)
            product = CpuProduct(matrix.of)
            took[name] = seconds(lambda x=x, product=product: product(x, None))  # type: ignore[misc]
            took[f"{name}, widened"] = seconds(
                lambda x=x, of=matrix.of: torch.nn.functional.linear(x, codes.widened(of, x.dtype))  # type: ignore[misc]
            )
        found += [Row("", f"{n}x{k}", f"{count} rows", name, 1e3 * each, "ms") for name, each in took.items()]
    return found


if __name__ == "__main__":
    main()
