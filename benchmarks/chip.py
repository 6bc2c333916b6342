"""What chips can do: the ceilings that floors are reckoned with.

    python -m benchmarks.chip

measures both on the GPU at hand: a device-to-device copy of 4 GiB, counting bytes read and written, and a bf16 matrix
product of size 8192 on random data, repeated until the clock has settled. Figures of a chip without an entry here have
no floor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple


class Chip(NamedTuple):
    copy_bytes_per_s: float
    matmul_flops: float


H200 = Chip(4217e9, 747e12)
H100 = Chip(2986e9, 672e12)
MEASURED = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}


def at_hand() -> Chip | None:
    """The entry of the current GPU; None if there is none."""
    import torch

    return MEASURED.get(torch.cuda.get_device_name())


def measure() -> Chip:
    import torch

    def seconds(call: Callable[[], object], calls: int) -> float:
        times = []
        for _ in range(calls):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times[calls // 2 :])

    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), 40)
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    product = seconds(lambda: torch.mm(left, right, out=out), 400)
    return Chip(2 * source.numel() / copy, 2 * size**3 / product)


if __name__ == "__main__":
    import torch

    found = measure()
    name = torch.cuda.get_device_name()
    print(f"{name}: copy {found.copy_bytes_per_s / 1e9:.0f} GB/s, product {found.matmul_flops / 1e12:.0f} TFLOP/s")
