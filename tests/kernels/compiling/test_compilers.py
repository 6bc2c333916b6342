"""Kernels are compiled by other processes, under the names that this one looks for; with a driver that counts."""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.compiler.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import quire.kernels  # noqa: E402
from quire.foundation.fork_server import ForkClient  # noqa: E402
from quire.kernels.elementwise.triton import norm  # noqa: E402
from quire.kernels.sampling.triton import draw, penalties  # noqa: E402
from quire.kernels.triton import compilers  # noqa: E402
from quire.kernels.triton.kernel_names import settle_name  # noqa: E402
from quire.kernels.triton.rehearsal import Rehearsal  # noqa: E402
from tests.kernels.compiling.test_rehearsal import CountingDriver, counting, kernels  # noqa: E402, F401

NAMES = """
import json, sys
from importlib import import_module
from quire.kernels.triton.compile_server import WithoutTorch
sys.meta_path.insert(0, WithoutTorch())
from triton.runtime.jit import JITFunction
from quire.kernels.triton.kernel_names import settle_name
functions = {
    f"{module}.{name}": function
    for module in sys.argv[1:]
    for name, function in vars(import_module(module)).items()
    if isinstance(function, JITFunction)
}
for function in reversed(functions.values()):
    settle_name(function)
print(json.dumps({name: function.cache_key for name, function in functions.items()}))
"""


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every kernel that this process looked for, whether it was there."""
    found: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit))
    monkeypatch.setattr(compilers, "usable_cores", lambda: 4)
    return found


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """This process has compiled none of it, and knows no name of a kernel."""
    forget()
    yield
    forget()


def forget() -> None:
    for module in (norm, draw, penalties):
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                function.hash, function.used_global_vals = None, {}
                function.device_caches.clear()


def norms() -> None:
    for width in (512, 1024):
        norm.rms_norm(torch.zeros(4, width), torch.zeros(width), 1e-6)


def penalties_of_rows() -> None:
    """Two kernels that call the same functions, with constants of several modules."""
    ints = torch.zeros(4096, dtype=torch.int32)
    history: Any = SimpleNamespace(token_of_slot=ints, block_table=ints.view(4, -1), block_size=16, max_len=512)
    scratch: Any = SimpleNamespace(counts=ints)
    penalties.penalize(torch.zeros(4, 64), ints.view(4, -1), ints[:4], ints[:4], history, scratch)


def children() -> str:
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text(encoding="ascii")


def test_without_torch_and_in_another_order_every_kernel_has_the_same_name_in_the_cache() -> None:
    found = pkgutil.walk_packages(quire.kernels.__path__, "quire.kernels.")
    modules = [module.name for module in found if ".triton." in module.name]
    ours = {
        f"{module}.{name}": function
        for module in modules
        for name, function in vars(import_module(module)).items()
        if isinstance(function, JITFunction)
    }
    for function in ours.values():
        settle_name(function)
    done = subprocess.run(
        [sys.executable, "-c", NAMES, *modules], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == {name: function.cache_key for name, function in ours.items()}
    assert len(ours) > 300


def test_kernels_come_from_other_processes_which_then_end(counting: CountingDriver, hits: list[bool]) -> None:  # noqa: F811
    before = children()
    with Rehearsal() as rehearsed:
        norms()
        penalties_of_rows()
    assert rehearsed.wait() == 4
    assert hits == [True] * 4
    assert children() == before
    assert triton.knobs.cache.manager_class is None
    norms()
    penalties_of_rows()
    assert hits == [True] * 4
    assert counting.launched == ["_rms_norm_kernel", "_rms_norm_kernel", "_count", "_apply"]


def test_no_process_is_begun_for_what_is_in_the_cache(
    counting: CountingDriver,  # noqa: ARG001, F811
    hits: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Rehearsal() as rehearsed:
        norms()
    rehearsed.wait()
    forget()
    monkeypatch.setattr(compilers, "ForkClient", None)
    with Rehearsal() as rehearsed:
        norms()
    assert rehearsed.wait() == 2
    assert hits == [True] * 4


def test_a_kernel_that_is_read_again_counts_once(
    counting: CountingDriver,  # noqa: ARG001, F811
    hits: list[bool],  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Python 3.11 may say that a source was not read (`rehearsal.whole`) after the other processes had been asked."""
    monkeypatch.setattr(compilers, "_SERVER", "quire.no_such_module")
    make, spoilt = (
        ASTSource.make_ir,
        iter([SystemError("AST constructor recursion depth mismatch (before=1, after=2)")]),
    )

    def read(self: ASTSource, *args: Any, **options: Any) -> Any:
        for error in spoilt:
            raise error
        return make(self, *args, **options)

    monkeypatch.setattr(ASTSource, "make_ir", read)
    with Rehearsal() as rehearsed:
        norms()
    assert rehearsed.wait() == 2
    assert [compiling.exception() for compiling in rehearsed._compiling] == [None, None]
    assert "2 kernels had to be compiled in this process" in caplog.text


@pytest.mark.parametrize("what", ["it has no such kernel", "it does not start", "it is killed"])
def test_what_they_do_not_compile_is_compiled_here(
    counting: CountingDriver,  # noqa: ARG001, F811
    hits: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    if what == "it does not start":
        monkeypatch.setattr(compilers, "_SERVER", "quire.no_such_module")
    if what == "it is killed":

        class Killed(ForkClient):
            def send(self, number: int, body: bytes) -> None:
                super().send(number, body)
                os.kill(self.pid, signal.SIGKILL)

        monkeypatch.setattr(compilers, "ForkClient", Killed)
    before = children()
    with Rehearsal() as rehearsed:
        if what == "it has no such kernel":
            add, _ = kernels()
            x = torch.zeros(64)
            add[(1,)](x, x, 5, BLOCK=16)
            add[(1,)](x, x, 5, BLOCK=32)
        else:
            norms()
    assert rehearsed.wait() == 2
    assert [compiling.exception() for compiling in rehearsed._compiling] == [None, None]
    assert hits == [False, False]
    assert children() == before
    assert "2 kernels had to be compiled in this process" in caplog.text


def test_those_begun_early_compile(counting: CountingDriver, hits: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001, F811
    before = children()
    compilers.begin_early()
    compilers.begin_early()
    [begun] = compilers._begun.values()
    assert children() != before
    with Rehearsal() as rehearsed:
        assert rehearsed._compilers is begun
        norms()
    assert rehearsed.wait() == 2
    assert hits == [True, True]
    assert children() == before
    monkeypatch.setattr(compilers, "ForkClient", None)
    compilers.begin_early()  # there are kernels now
    assert not compilers._begun


def test_those_begun_early_for_another_folder_are_left_to_it(
    counting: CountingDriver,  # noqa: ARG001, F811
    hits: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    compilers.begin_early()
    [strangers] = compilers._begun.values()
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
        with Rehearsal() as rehearsed:
            norms()
        assert rehearsed.wait() == 2
    assert hits == [True, True]
    assert compilers.take_compilers() is strangers
    strangers.close()


def test_few_processors_have_enough_to_do(
    counting: CountingDriver,  # noqa: ARG001, F811
    hits: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compilers, "usable_cores", lambda: 2)
    monkeypatch.setattr(compilers, "ForkClient", None)
    with Rehearsal() as rehearsed:
        norms()
    assert rehearsed.wait() == 2
    assert [compiling.exception() for compiling in rehearsed._compiling] == [None, None]
    assert hits == [False, False]


def test_nothing_is_left_of_a_rehearsal_that_nobody_waits_for(
    counting: CountingDriver,  # noqa: ARG001, F811
    hits: list[bool],
) -> None:
    """As where weights turn out to be broken."""
    before, others = children(), set(threading.enumerate())
    with Rehearsal() as rehearsed:
        norms()
    compiling = list(rehearsed._compiling)
    del rehearsed
    for one in compiling:
        one.exception(60)
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
        assert not thread.is_alive()
    assert hits == [True, True]
    assert children() == before
    assert triton.knobs.cache.manager_class is None


def test_nothing_is_left_of_a_rehearsal_that_fails(
    counting: CountingDriver,  # noqa: ARG001, F811
    hits: list[bool],  # noqa: ARG001
) -> None:
    before = children()

    def fail() -> Any:
        with Rehearsal():
            norms()
            raise ValueError("told")

    with pytest.raises(ValueError, match="told"):
        fail()
    assert children() == before
    assert triton.knobs.cache.manager_class is None
