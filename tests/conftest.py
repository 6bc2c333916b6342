"""What all tests may rely on."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from functools import cache
from operator import attrgetter
from typing import Any

import httpx
import pytest

from tests.effort import SAMPLE, WHOLE, keep_some
from tests.server.process import ServerProcess, server_process

if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core: more threads would only wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")


LONGEST = ("tests/kernels/test_interpreted.py", "tests/server/", "tests/e2e/", "tests/distributed/")


def pytest_report_header() -> str:
    return "sweeps: whole" if WHOLE else f"sweeps: sample {SAMPLE} (QUIRE_SAMPLE)"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests are made of stays: each of some hundred engines, which tidy up as they start, would look at all of it.

    A million objects, most of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not WHOLE and "not long" in config.getoption("markexpr"):
        keep_some(items)
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))  # first, so that what ends the run is short


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test and its fixtures draw goes by its name, whatever ran before, and wherever."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    for name, begin in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:  # who draws has imported it
            attrgetter(begin)(sys.modules[name])(seed)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """As in a terminal: a run that a shell has put in the background starts with SIGINT ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def ctrl_c_is_left_as_it_was() -> Iterator[None]:
    """What a test leaves behind would be another test's failure, somewhere else and not each time."""
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    if after is not before:
        signal.signal(signal.SIGINT, before)
        pytest.fail(f"Ctrl-C is left to {after}")


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """Each client of httpx would read the certificates of the world's authorities, which takes 17 ms.

    Hundreds of clients, and each look at a server that is waited for, speak plain HTTP.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def triton_interpreter() -> None:
    """What Triton's interpreter stumbles over in kernels that compile.

    A scalar argument is an array of one, which NumPy 2.4 no longer takes for an index; a scalar condition that is
    combined with a vector of them is kept as int32, which newer versions refuse as a mask.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def patched(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def as_bool(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(bool), mask.dtype) if mask.data.dtype != bool else mask

    interpreter._patch_lang_tensor = patched
    builder.create_masked_load = lambda self, pointers, mask, *rest, **named: load(
        self, pointers, as_bool(mask), *rest, **named
    )
    builder.create_masked_store = lambda self, pointers, value, mask, *rest, **named: store(
        self, pointers, value, as_bool(mask), *rest, **named
    )


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    """`quire serve` with the shipped model under the names demo and quire-demo, for all tests that only ask it."""
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--served-model-name", "demo", "quire-demo"]
    options += ["--max-logprobs", "40", "--enable-tokenizer-info-endpoint", "--num-gpu-blocks-override", "1000"]
    with server_process("quire.cli.main", "serve", *options) as process:
        assert process.url
        yield process
