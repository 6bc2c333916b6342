"""A core's process that is begun ahead: used once, by whom it suits, and gone if nobody does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from quire.config.engine import EngineConfig
from quire.engine import early
from quire.engine.remote import ProcessClient
from tests.engine.echo_worker import NAME, make_resolved
from tests.server.process import wait_until

BEGUN = """
from quire.config.engine import EngineConfig
from quire.engine import early
early.begin(EngineConfig.from_flat(device="cpu"))
print(early._begun[0].pid)
"""


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    """Neither by a test, nor to it: by commands that others have run in this process, and that ended early."""
    stop_all()
    yield
    stop_all()


def stop_all() -> None:
    while early._begun:
        early._begun.pop().stop(grace=0)


def test_the_next_core_is_the_one_that_was_begun() -> None:
    early.begin(EngineConfig.from_flat(device="cpu"))
    early.begin(EngineConfig.from_flat(device="cpu"))
    [begun] = early._begun
    first = ProcessClient(make_resolved(), NAME)
    second = ProcessClient(make_resolved(), NAME)
    try:
        assert first.pid == begun.pid != second.pid
        assert "libtorch" in "".join(part.path for part in psutil.Process(first.pid).memory_maps())
        assert "libtorch" not in "".join(part.path for part in psutil.Process(second.pid).memory_maps())  # it echoes
        first.kill()
        first.restart()
        assert first.pid != begun.pid
    finally:
        first.shutdown()
        second.shutdown()


@pytest.mark.parametrize("options", [
    {"data_parallel_size": 2}, {"tensor_parallel_size": 2}, {"distributed_executor_backend": "mp"},
    {"trust_remote_code": True},
], ids=str)  # fmt: skip
def test_none_is_begun_for_another_kind_of_core(options: dict[str, Any]) -> None:
    early.begin(EngineConfig.from_flat(**options))
    assert early._begun == []


def test_one_of_other_variables_is_not_taken() -> None:
    early.begin(EngineConfig.from_flat(device="cpu"))
    other = early.take("core", {"SOMETHING": "1"})
    assert len(early._begun) == 1
    other.stop(grace=0)


def test_it_ends_with_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", BEGUN], capture_output=True, text=True, check=True, timeout=60)
    pid = int(done.stdout)
    assert wait_until(lambda: not psutil.pid_exists(pid))
    assert done.stderr == ""
