"""Launches without Triton's look are Triton's own: the same kernel with the same arguments, whatever changes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from quire.kernels.attention.rope import QkvTarget  # noqa: E402
from quire.kernels.triton import launches  # noqa: E402
from quire.kernels.triton.launch import GLUON_TESTED  # noqa: E402
from quire.kernels.triton.launches import launch  # noqa: E402
from tests.kernels.compiling.test_rehearsal import CountingDriver  # noqa: E402


class RecordingDriver(CountingDriver):
    """Keeps what each launch was given."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Any] = []
        self.told: tuple[Any, ...] = ()  # who is to hear of the last launch
        self.utils.load_binary = lambda name, kernel, *_: (name, hash(kernel), 0, 0, 1024)

    def get_current_stream(self, _: int) -> int:
        return 77

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        signature, constants = tuple(src.signature.items()), repr(sorted(src.constants.items()))

        def launcher(x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
            self.told, arguments = rest[1:3], tuple(map(shown, rest[3:]))
            self.launched.append(
                (
                    src.fn.__name__,
                    x,
                    y,
                    z,
                    stream,
                    function,
                    packed,
                    signature,
                    constants,
                    metadata.num_warps,
                    arguments,
                )
            )

        return launcher


def shown(argument: Any) -> Any:
    """What can be told of an argument, and is the same of another call with the like."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape, argument.stride()
    if hasattr(argument, "block_shape"):
        return "descriptor", shown(argument.base), argument.shape, argument.strides, argument.block_shape
    return type(argument), argument


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[RecordingDriver]:
    found = RecordingDriver()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "_active", found)
    monkeypatch.setattr(launches, "_compiled", {})
    for name, module in list(sys.modules.items()):  # what other drivers have loaded
        for kernel in vars(module).values() if name.startswith("quire.kernels.") else ():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()
    yield found
    launches._compiled.clear()
    gc.collect()  # kernels are unloaded by the driver that has loaded them


@pytest.fixture
def scaled(recording: RecordingDriver) -> Any:  # noqa: ARG001 (its launchers are of this driver)
    """A kernel that no test has launched before."""

    @triton.jit(do_not_specialize=["rows"])
    def kernel(out, x, x_desc, rows, n, factor, SQUARED: tl.constexpr, BLOCK: tl.constexpr, PLUS: tl.constexpr = 0):
        at = tl.program_id(0) * n + tl.arange(0, BLOCK)
        there = (tl.arange(0, BLOCK) < n) & (tl.program_id(0) < rows)
        y = tl.load(x + at, there, 0) * factor + PLUS
        tl.store(out + at, y * y if SQUARED else y, there)
        x_desc.store([0, 0], x_desc.load([0, 0]))

    return kernel


def given(dtype: torch.dtype, rows: int, n: int, shift: int) -> tuple[Any, ...]:
    memory = torch.zeros(-(-(rows * n + 8) // 8) * 8, dtype=dtype)
    x = memory[shift : shift + rows * n].view(rows, n)
    return torch.empty(rows, n, dtype=dtype), x, TensorDescriptor.from_tensor(memory.view(1, -1)[:, :8], [1, 8])


def test_the_triton_that_is_here_is_one_that_launches_are_known_of() -> None:
    """If this fails, run this file and tests on a GPU with the new version, and add it."""
    assert launches._IS_KNOWN, triton.__version__


def test_whatever_changes_the_same_is_launched(recording: RecordingDriver, scaled: Any) -> None:
    """Types, alignment, numbers that are 1, divide by 16 or need 64 bits, options, defaults; the second time too."""
    cases = [
        (dtype, rows, n, shift, factor, options)
        for dtype in (torch.float32, torch.bfloat16)
        for rows, n in ((3, 16), (1, 16), (3, 1), (16, 48), (17, 5), (2, 48))
        for shift in (0, 1)
        for factor in (2.0, 3)
        for options in (
            {"SQUARED": True, "BLOCK": 64}, {"SQUARED": False, "BLOCK": 64, "PLUS": 2, "num_warps": 2},
        )
    ]  # fmt: skip
    for _ in range(2):
        for dtype, rows, n, shift, factor, options in cases:
            arguments = (*given(dtype, rows, n, shift), rows, n, factor)
            for grid in ((rows,), (rows, 2), (rows, 1, 3)):
                recording.launched.clear()
                scaled[grid](*arguments, **options)
                for _ in range(2):
                    launch(scaled, grid, *arguments, **options)
                theirs, *ours = recording.launched
                assert ours == [theirs, theirs], (rows, n, shift, factor, options)
    wide = (*given(torch.float32, 2, 16, 0), 1 << 40, 1 << 33, 1.0)
    recording.launched.clear()
    scaled[(1,)](*wide, SQUARED=True, BLOCK=64)
    launch(scaled, (1,), *wide, SQUARED=True, BLOCK=64)
    assert recording.launched[0] == recording.launched[1]


def test_triton_looks_at_each_kind_once(
    recording: RecordingDriver, scaled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    run = type(scaled).run
    monkeypatch.setattr(launches, "_OWN_RUN", lambda *a, **k: looks.append(1) or run(*a, **k))
    monkeypatch.setattr(type(scaled), "run", launches._OWN_RUN)
    for rows in (5, 7, 9, 11):
        launch(scaled, (rows,), *given(torch.float32, rows, 16, 0), rows, 16, 0.5, SQUARED=True, BLOCK=64)
    assert len(looks) == 1
    assert len(recording.launched) == 4


def test_who_asks_to_be_told_of_launches_is(recording: RecordingDriver, scaled: Any) -> None:
    def again() -> tuple[Any, ...]:
        launch(scaled, (2,), *given(torch.float32, 2, 16, 0), 2, 16, 1.0, SQUARED=True, BLOCK=64)
        return recording.told

    again()
    assert again() == (None, None)
    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hooks.add(print)
        try:
            assert hooks in again()
        finally:
            hooks.remove(print)
    assert again() == (None, None)
    assert len(recording.launched) == 5


def test_while_launches_are_rehearsed_triton_has_them_all(
    recording: RecordingDriver, scaled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*given(torch.float32, 2, 16, 0), 2, 16, 1.0)
    launch(scaled, (2,), *arguments, SQUARED=True, BLOCK=64)
    noted: list[Any] = []
    monkeypatch.setattr(type(scaled), "run", lambda *a, **_: noted.append(a))
    launch(scaled, (2,), *arguments, SQUARED=True, BLOCK=64)
    assert len(recording.launched) == len(noted) == 1


def test_constants_go_by_name_and_all_else_by_place(recording: RecordingDriver, scaled: Any) -> None:
    out, x, desc = given(torch.float32, 2, 16, 0)
    with pytest.raises(AssertionError, match="constants are given by their names"):
        launch(scaled, (2,), out, x, desc, 2, 16, 1.0, 1, BLOCK=64)
    with pytest.raises(AssertionError, match="what changes is given by its place"):
        launch(scaled, (2,), out, x, desc, 2, 16, factor=1.0, SQUARED=True, BLOCK=64)
    assert len(recording.launched) == 2


def test_what_is_of_another_kind_is_left_to_triton(recording: RecordingDriver, scaled: Any) -> None:
    arguments = (*given(torch.float32, 2, 16, 0), 2, 16, True)
    scaled[(2,)](*arguments, SQUARED=True, BLOCK=64)
    for _ in range(2):
        launch(scaled, (2,), *arguments, SQUARED=True, BLOCK=64)
    theirs, *ours = recording.launched
    assert ours == [theirs, theirs]
    assert not launches._compiled


def some_kernels() -> dict[str, Callable[[], object]]:
    """Of prompt steps, as their callers launch them; `ROWS` by which numbers and grids change."""
    from quire.kernels.attention.triton import prefill_schedule, qkv_sm90, rope
    from quire.kernels.elementwise.triton import activation, norm
    from quire.kernels.gemm.triton import fp8_rows, wide_gemm_sm90
    from quire.kernels.moe.routes import Rule
    from quire.kernels.moe.triton import experts, routing

    narrow = torch.bfloat16
    rows = iter([1000, 1024, 2048, 3001] * 100)
    weight, gain = torch.zeros(512, 256, dtype=narrow), torch.zeros(256, dtype=narrow)
    cos_sin = torch.zeros(64, 128)
    caches = [torch.zeros(4, 1, 16, 128, dtype=narrow) for _ in range(2)]
    rule = Rule(8, 2)
    gate_up, down = torch.zeros(8, 128, 256, dtype=narrow), torch.zeros(8, 256, 64, dtype=narrow)

    def x(width: int = 256) -> torch.Tensor:
        return torch.zeros(next(rows), width, dtype=narrow)

    def place(count: int) -> tuple[Any, ...]:
        ints = torch.zeros(count, dtype=torch.int32)
        return cos_sin, ints, ints, *caches, 2, 1, 128

    def turned() -> torch.Tensor:
        qkv = x(512)
        return rope.qk_norm_rope_write(qkv, *place(len(qkv)), None, None, 1e-6)

    def projected() -> torch.Tensor:
        y = x()
        return qkv_sm90.qkv_rope_write(y, weight, None, QkvTarget(*place(len(y))))

    def mixed() -> torch.Tensor:
        y = x()
        routes = routing.route(torch.zeros(len(y), 8), rule, None, None)
        return experts.add_experts(y, routes, gate_up, down, torch.zeros_like(y), None)

    def scheduled() -> torch.Tensor:
        ints = torch.zeros(3, dtype=torch.int32)
        return prefill_schedule.tiles(ints, torch.zeros(4, dtype=torch.int32), ints, next(rows), 700, 32)

    return {
        "norm": lambda: norm.rms_norm(x(), gain, 1e-6), "norm of few": lambda: norm.rms_norm(x()[:3], gain, 1e-6),
        "pair": lambda: norm.rms_norm_pair(x(), (gain[:128], gain[128:]), 1e-6),
        "silu": lambda: activation.silu_and_mul(x()), "gated": lambda: wide_gemm_sm90.gated(x(), weight),
        "rope": turned, "qkv": projected, "experts": mixed, "tiles": scheduled, "fp8": lambda: fp8_rows.quantize(x()),
    }  # fmt: skip


@pytest.mark.parametrize("name", [
    "norm", "norm of few", "pair", "silu", "rope", "experts", "tiles", "fp8",
    *(["gated", "qkv"] if triton.__version__.startswith(GLUON_TESTED) else []),
])  # fmt: skip
def test_kernels_of_prompts_are_launched_as_by_triton(
    recording: RecordingDriver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in ("gemm.triton.wide_gemm_sm90", "attention.triton.qkv_sm90"):
        monkeypatch.setattr(f"quire.kernels.{module}._built", set())
    found = []
    for is_known in (False, True, True):
        monkeypatch.setattr(launches, "_IS_KNOWN", is_known)
        run = some_kernels()[name]
        recording.launched.clear()
        for _ in range(4):
            run()
        found.append(list(recording.launched))
    assert len(found[0]) >= 4
    assert found[1] == found[2] == found[0]
