"""What a step's kernels take, by name."""

from __future__ import annotations

from benchmarks.timeline import Kernel, by_name


def test_what_kernels_take_until_the_next_one_begins_adds_up_to_the_step() -> None:
    step = [Kernel(0, 10, "product"), Kernel(8, 12, "norm"), Kernel(12, 40, "product"), Kernel(45, 47, "norm")]
    found = by_name(step)
    assert found == {"product": (2, 8 + 33), "norm": (2, 4 + 2)}
    assert list(found) == ["product", "norm"]
    assert sum(micros for _, micros in found.values()) == 47
