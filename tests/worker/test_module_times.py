"""Times of layers and what they would be at best, and the names of layers in a profile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.types.kv import KVGroupSpec
from quire.worker.module_times import Device, ModuleTimes, measure_device, op_floor
from quire.worker.ranges import Ranges

SLOW = Device(bytes_a_second=1e6, products_a_second=1e6)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_of_a_kind_are_one_line_with_their_own_time_and_floor() -> None:
    model = Trunk()
    group = KVGroupSpec(kind="full", block_size=16, num_layers=2, num_kv_heads=1, head_dim=8, dtype_bytes=4)
    times = ModuleTimes(model, [group], torch.device("cpu"))
    times.open()
    for _ in range(3):
        model(torch.ones(4, 8))
    times.close()
    model(torch.ones(4, 8))  # nobody listens any more
    layers = {layer.name: layer for layer in times.layers(SLOW)}
    assert layers.keys() == {"layers.*", "layers.*.up", "layers.*.down"}
    assert [layer.calls for layer in layers.values()] == [6] * 3
    assert times.smallest_stack == 2
    # Products: 4 tokens x 8 x 32; bytes: 1 KiB of weights, 4 x 8 and 4 x 32 numbers in and out.
    for name in ("layers.*.up", "layers.*.down"):
        assert layers[name].floor == pytest.approx(6 * max(4 * 8 * 32, 1024 + 4 * (4 * 8 + 4 * 32)) / 1e6)
        assert layers[name].seconds > 0
    assert layers["layers.*"].floor == 0  # its layers do the work
    assert layers["layers.*"].seconds < sum(layer.seconds for layer in layers.values())


@pytest.mark.parametrize(
    ("name", "shapes", "seconds"),
    [
        ("aten::mm", [[4, 8], [8, 32]], 4 * 8 * 32 / 1e6),
        ("aten::addmm", [[32], [4, 8], [8, 32]], 4 * 8 * 32 / 1e6),
        ("aten::bmm", [[2, 1, 8], [2, 8, 8]], 2 * (8 + 64 + 8) * 2 / 1e6),  # more bytes than products
        ("aten::mul", [[4, 8], [4, 1]], 36 * 2 / 1e6),
        ("aten::view", [[4, 8], []], 0.0),
        ("aten::linear", [[4, 8], [32, 8], []], 0.0),
        ("mine::kernel", [[4, 8]], 0.0),
    ],
)
def test_the_floor_of_an_operation(name: str, shapes: list[list[int]], seconds: float) -> None:
    assert op_floor(name, shapes, 2, SLOW) == pytest.approx(seconds)


def test_a_device_is_measured() -> None:
    found = measure_device(torch.device("cpu"), torch.float32)
    assert 1e8 < found.bytes_a_second < 1e13
    assert 1e8 < found.products_a_second < 1e16


def test_layers_have_names_in_a_trace_while_they_are_asked_for() -> None:
    model = Trunk()
    ranges = Ranges(model, nvtx=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        ranges.open()
        with ranges.named("step 7"):
            model(torch.ones(4, 8))
        ranges.close()
        model(torch.ones(4, 8))
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["step 7"] == 1
    assert counts["layers.0.up"] == counts["layers.1.down"] == 1


def test_a_layer_that_fails_ends_its_range() -> None:
    model = Trunk()
    ranges = Ranges(model, nvtx=False)
    ranges.open()
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 9))
    assert ranges._stack == []
    ranges.close()
    model(torch.ones(4, 8))
