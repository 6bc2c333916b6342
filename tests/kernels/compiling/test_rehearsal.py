"""Kernels are noted, compiled aside and then only launched: with a driver that counts instead of a GPU."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from quire.distributed.peer_memory import Layout  # noqa: E402
from quire.kernels.sampling.state import Column, Stats  # noqa: E402
from quire.kernels.sampling.triton import apart  # noqa: E402
from quire.kernels.summands import Summands  # noqa: E402
from quire.kernels.triton import across_ranks  # noqa: E402
from quire.kernels.triton import rehearsal as rehearsing  # noqa: E402
from quire.kernels.triton.rehearsal import Rehearsal  # noqa: E402
from tests.kernels.peers import make_peers  # noqa: E402


class CountingDriver:
    """Compiles for compute capability 9.0 and loads nothing; a launch is a line in `launched`."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.utils = SimpleNamespace(
            load_binary=lambda name, *_: (name, name, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232448},
            unload_module=lambda _: None,
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, src: Any, _: Any) -> Any:
        return lambda *_: self.launched.append(src.fn.__name__)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[CountingDriver]:
    found = CountingDriver()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(driver, "_active", found)
    yield found
    gc.collect()  # kernels are unloaded by the driver that has loaded them


@triton.jit
def doubled(x):
    return x + x


def calling() -> Any:
    @triton.jit
    def double(x):
        tl.store(x, doubled(tl.load(x)))

    return double


def kernels() -> tuple[Any, Any]:
    @triton.jit
    def add(out, x, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

    @triton.jit
    def broken(out, BLOCK: tl.constexpr):
        tl.static_assert(BLOCK == 1, "no such block")
        tl.store(out, 0)

    return add, broken


def test_the_triton_that_is_here_is_one_that_these_tests_know() -> None:
    """If this fails, run the others of this file and on a GPU with the new version, and add it."""
    assert rehearsing.is_possible(), triton.__version__


def test_with_another_triton_nothing_of_it_is_patched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    assert not rehearsing.is_possible()
    assert "triton 4.0.0" in caplog.text


def test_every_variant_is_compiled_once_and_launched_only_afterwards(counting: CountingDriver) -> None:
    add, _ = kernels()
    x = torch.zeros(64)
    compiled: list[str] = []
    knobs = triton.knobs.runtime
    knobs.jit_post_compile_hook = lambda **found: compiled.append(found["repr"])
    try:
        with Rehearsal() as rehearsal:
            for _ in range(3):
                add[(1,)](x, x, 5, BLOCK=16)
                add[(1,)](x, x, 5, BLOCK=32, num_warps=1)
            add[(2,)](x, x, 6, BLOCK=16)  # no other kernel
            add[(1,)](x, x, 1, BLOCK=16)  # n = 1 and arrays of another type are compiled for themselves
            add[(1,)](x.double(), x, 5, BLOCK=16)
        assert rehearsal.wait() == 4
        assert [one.exception() for one in rehearsal._compiling] == [None] * 4
        assert len(compiled) == 4
        assert counting.launched == []
        add[(1,)](x, x, 7, BLOCK=16)
        add[(1,)](x, x, 7, BLOCK=32, num_warps=1)
        assert counting.launched == ["add", "add"]
        assert len(compiled) == 4, "a variant was compiled again at its launch"
    finally:
        knobs.jit_post_compile_hook = None
    assert knobs.jit_cache_hook is None


def test_descriptors_of_tensors_that_differ_in_length_alone_are_the_same_launch() -> None:
    def described(rows: int, lines: int, dtype: torch.dtype = torch.float16) -> Any:
        return rehearsing._kind(TensorDescriptor.from_tensor(torch.zeros(rows, 64, dtype=dtype), [lines, 64]))

    assert described(64, 16) == described(128, 16)
    assert described(64, 16) != described(64, 32)
    assert described(64, 16) != described(64, 16, torch.bfloat16)


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """New tensors hold NaN and the largest integers instead of what was there before."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("counting", "filled_memory")
def test_what_no_kernel_has_written_may_be_looked_up_by() -> None:
    add, _ = kernels()
    table, given = torch.ones(3), torch.zeros(4, dtype=torch.int32)
    with Rehearsal() as rehearsal, torch.inference_mode():
        for place in (
            torch.empty(4, dtype=torch.int32), torch.empty_like(given), given.new_empty(4),
            torch.empty_strided((4,), (2,), dtype=torch.int32), given.new_empty_strided((4,), (1,)),
        ):  # fmt: skip
            add[(1,)](place, given, 4, BLOCK=16)
            assert table.index_select(0, place).tolist() == [1.0] * 4
            torch.zeros(4).scatter_(0, place.long(), 1)
    rehearsal.wait()
    assert not torch.equal(torch.empty(4), torch.zeros(4)), "other memory is left alone"


def test_nothing_is_launched_in_a_rehearsal_but_by_other_threads(counting: CountingDriver) -> None:
    add, _ = kernels()
    x = torch.zeros(64)
    add[(1,)](x, x, 5, BLOCK=16)
    counting.launched.clear()
    with Rehearsal() as rehearsal:
        add[(1,)](x, x, 5, BLOCK=16)
        assert counting.launched == []
        other = threading.Thread(target=lambda: add[(1,)](x, x, 5, BLOCK=32))
        other.start()
        other.join()
    assert counting.launched == ["add"]
    assert rehearsal.wait() == 0
    add[(1,)](x, x, 5, BLOCK=16)
    assert counting.launched == ["add", "add"]


def test_source_that_another_thread_spoiled_is_read_again() -> None:
    mismatch = SystemError("AST constructor recursion depth mismatch (before=39, after=174)")
    errors: list[Exception] = [mismatch, mismatch]

    def read() -> str:
        if errors:
            raise errors.pop()
        return "read"

    assert rehearsing.whole(read) == "read"
    errors.append(SystemError("another"))
    with pytest.raises(SystemError, match="another"):
        rehearsing.whole(read)
    errors += [mismatch] * 11
    with pytest.raises(SystemError, match="mismatch"):
        rehearsing.whole(read)


def test_source_of_a_called_function_that_another_thread_spoiled(
    counting: CountingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, spoiled = triton.JITFunction.parse, list[str]()

    def spoil(function: Any) -> Any:
        if function.__name__ == "doubled" and len(spoiled) < 2:
            spoiled.append("doubled")
            raise SystemError("AST constructor recursion depth mismatch (before=39, after=174)")
        return parse(function)

    monkeypatch.setattr(triton.JITFunction, "parse", spoil)
    with Rehearsal() as rehearsal:
        calling()[(1,)](torch.zeros(1))
    assert rehearsal.wait() == 1
    assert [compiling.exception() for compiling in rehearsal._compiling] == [None]
    assert len(spoiled) == 2
    assert counting.launched == []


def test_a_kernel_that_does_not_compile_says_so_at_its_launch(counting: CountingDriver) -> None:
    _, broken = kernels()
    x = torch.zeros(1)
    with Rehearsal() as rehearsal:
        broken[(1,)](x, BLOCK=2)
    assert rehearsal.wait() == 1
    with pytest.raises(triton.CompilationError, match="no such block"):
        broken[(1,)](x, BLOCK=2)
    assert counting.launched == []


def test_kernels_across_ranks_compile_and_are_found(
    counting: CountingDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For a GPU that launches dependents early, which the interpreter leaves out; by tables that hold addresses."""
    for module in (across_ranks, apart):
        monkeypatch.setattr(module, "has_pdl", lambda _: True)
    layout = Layout(4, 4096, 2, max_rows=64, vocab=5000, logit_rows=48, drafts=300)
    peers = make_peers(tmp_path / "memory", layout)[1]
    x, tokens = torch.zeros(4, 4096, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    experts = torch.zeros(2, 2, dtype=torch.int32)
    stats, columns = Stats.allocate(48, 2512, x.device), torch.zeros(9, len(Column), dtype=torch.int32)

    def step() -> None:
        across_ranks.reduce_once(x, x, peers)
        across_ranks.reduce_twice(x, x, peers)
        across_ranks.reduce_twice(x, x, peers, (x[0], 1e-6))
        across_ranks.reduce_once(Summands(x.view(2, 2, -1), experts), x[:2], peers, (x[0], 1e-6))
        across_ranks.reduce_twice(Summands(x.view(2, 2, -1), experts), x[:2], peers)
        across_ranks.reduce_twice(Summands(x.view(2, 2, -1)), x[:2], peers)
        assert peers.logits is not None
        across_ranks.gather_columns(torch.zeros(4, 2512), peers.logits[:4], peers)
        across_ranks.from_first(tokens, peers)
        across_ranks.from_first(torch.zeros(300, dtype=torch.int32), peers, "drafts")
        apart.draw_apart(peers.logits[:4, :2512], columns, tokens, tokens, tokens, stats, peers)

    with Rehearsal() as rehearsal:
        step()
    assert rehearsal.wait() == 11
    assert counting.launched == []
    step()
    assert len(counting.launched) == 11
    with Rehearsal() as rehearsal:
        step()
    assert rehearsal.wait() == 0, "some kernel was not compiled, or not as it is launched"
