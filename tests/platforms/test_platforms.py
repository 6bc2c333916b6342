"""What a platform says of the machine, held against the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.foundation import cores
from quire.foundation.errors import ConfigError
from quire.platforms import cpu, select_platform


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_unknown_platform() -> None:
    with pytest.raises(ConfigError, match=r"unknown platform 'tpu'.*known: cuda, cpu, torch"):
        select_platform("tpu")


def test_threads_as_asked() -> None:
    platform = select_platform("cpu")
    assert platform.set_up(3) == torch.device("cpu")
    assert torch.get_num_threads() == 3
    assert platform.device_name() == "cpu (3 threads)"


def test_threads_by_default_are_cores_this_process_may_use() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from quire.platforms import select_platform; import torch;"
        "select_platform('cpu').set_up(None); print(torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_two_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, core in enumerate([0, 0, 1, 1]):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "core_id").write_text(f"{core}\n")
        (folder / "physical_package_id").write_text("0\n")
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(cores, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert cores.usable_cores() == 2
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert cores.usable_cores() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores.usable_cores() == 2


def test_memory_is_what_the_container_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = select_platform("cpu")
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    assert 2**28 < platform.free_bytes() <= platform.total_bytes()
    machine = platform.total_bytes()
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert (platform.free_bytes(), platform.total_bytes()) == (600_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert platform.total_bytes() == machine


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="device=cuda, but"):
        select_platform("cuda").set_up(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_counts_its_memory() -> None:
    platform = select_platform("cuda")
    device = platform.set_up(None)
    free = platform.free_bytes()
    assert 0 < free <= platform.total_bytes()
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    assert abs(free - platform.free_bytes() - held.numel()) < 1 << 26
    del held
    assert abs(free - platform.free_bytes()) < 1 << 26, "what the allocator keeps unused is free"
    assert "NVIDIA" in platform.device_name()
