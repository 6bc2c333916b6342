"""An engine in the user's process: gone when it is shut down or dropped, and the process is as it was.

Nobody collects garbage here: what a device holds must not wait for a collector.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.foundation.errors import DoesNotFitError
from quire.models import catalog

FRESH = """
import gc, weakref
gc.disable()
frozen = gc.get_freeze_count()
from quire import LLM
llm = LLM(max_model_len=64)
held = weakref.ref(llm._client._core._executor._worker.runner.parts.store.data)
del llm
assert held() is None, gc.get_referrers(held())
assert gc.get_freeze_count() == frozen
"""

FIRST_ON_A_GPU = """
import torch
from quire import LLM, SamplingParams
torch.matmul(*(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)))  # the library is loaded
torch._C._cuda_clearCublasWorkspaces()
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
before, left = torch.cuda.mem_get_info()[0], []
for _ in range(3):
    with LLM(device="cuda", gpu_memory_utilization=0.5, max_num_seqs=64, max_num_batched_tokens=512) as llm:
        llm.generate(["one", "two"], SamplingParams(max_tokens=4), use_tqdm=False)
    assert torch.cuda.memory_reserved() <= 2 * 1024**2, torch.cuda.memory_snapshot()  # counters of kernels
    left.append(before - torch.cuda.mem_get_info()[0])
print(left)
assert left[0] < 100e6, left
assert max(left) - left[0] < 10e6, left
"""
WORKSPACE = 34e6  # bytes that the library keeps for a stream while somebody else holds tensors

LOST_DEVICE = """
import torch
from quire import LLM
from quire.worker.worker import Worker

def lose(self, *rest, **named):
    torch.zeros(1, device="cuda")[torch.tensor([1 << 40], device="cuda")]
    torch.cuda.synchronize()

Worker._measure = lose
try:
    LLM(max_model_len=64, device="cuda", gpu_memory_utilization=0.3)
except RuntimeError as error:
    print("read:", type(error).__name__, flush=True)
"""


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held_by(llm: LLM) -> dict[str, weakref.ref]:
    worker = llm._client._core._executor._worker
    runner = worker.runner
    found = {
        "worker": worker,
        "model": worker._model,
        "runner": runner,
        "KV": runner.parts.store.data,
        "logits": runner.parts.logits,
    }
    return {name: weakref.ref(one) for name, one in found.items()}


def alive(refs: dict[str, weakref.ref]) -> list[str]:
    return [name for name, ref in refs.items() if ref() is not None]


def answered() -> LLM:
    llm = LLM(max_model_len=64)
    llm.generate(["one", "two"], SamplingParams(max_tokens=4, temperature=0.5, top_p=0.9, logprobs=1), use_tqdm=False)
    return llm


@pytest.mark.usefixtures("without_collector")
def test_nothing_is_left_after_shutdown() -> None:
    llm = answered()
    refs = held_by(llm)
    llm.shutdown()
    assert alive(refs) == []
    llm.shutdown()  # once more is nothing


@pytest.mark.usefixtures("without_collector")
def test_nothing_is_left_after_with() -> None:
    with answered() as llm:
        refs = held_by(llm)
    assert alive(refs) == []


@pytest.mark.usefixtures("without_collector")
def test_nothing_is_left_of_one_that_is_dropped() -> None:
    llm = answered()
    refs = {**held_by(llm), "LLM": weakref.ref(llm), "client": weakref.ref(llm._client)}
    awake = llm._client._inbox._awake
    del llm
    assert alive(refs) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        open(awake)  # noqa: SIM115


def test_an_engine_that_is_dropped_in_the_process_that_loads_torch_for_it() -> None:
    """torch's import leaves garbage behind that holds the stack it was imported from."""
    subprocess.run([sys.executable, "-c", FRESH], check=True, cwd=Path(__file__).parents[2], timeout=120)


@pytest.mark.usefixtures("without_collector")
def test_who_keeps_the_error_of_a_start_keeps_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[weakref.ref] = []
    build = catalog.build

    def noted(*args: object) -> torch.nn.Module:
        model = build(*args)  # type: ignore[arg-type]
        built.append(weakref.ref(model))
        return model

    monkeypatch.setattr(catalog, "build", noted)
    with pytest.raises(DoesNotFitError, match="max_model_len") as refused:
        LLM(device="cpu", max_model_len=512, cpu_kv_cache_memory_bytes=20_000)
    assert refused.value.__traceback__ is not None
    assert len(built) == 1
    assert built[0]() is None


def test_the_process_keeps_its_settings() -> None:
    def settings() -> tuple[object, ...]:
        return gc.get_freeze_count(), gc.get_threshold(), gc.isenabled(), sys.getswitchinterval()

    before, threads = settings(), torch.get_num_threads()
    with answered():
        assert settings() == before
    assert settings() == before
    assert torch.get_num_threads() == threads


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_ten_engines_in_a_row_are_alike_and_give_all_back() -> None:
    """Beside somebody else's tensor, which is no engine's activation. Two at once, too, in the middle of the row."""
    theirs = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    torch.matmul(*(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)))  # the library is loaded
    blocks, left = [], [torch.cuda.mem_get_info()[0]]
    for number in range(10):
        llm = LLM(device="cuda", gpu_memory_utilization=0.5, max_num_seqs=64, max_num_batched_tokens=512)
        llm.generate(["one", "two"], SamplingParams(max_tokens=4), use_tqdm=False)
        blocks.append(llm.info.report.num_blocks)
        refs = held_by(llm)
        if number % 2:
            llm.shutdown()
        del llm
        assert alive(refs) == []
        left.append(torch.cuda.mem_get_info()[0])
    assert len(set(blocks)) == 1, blocks
    assert left[0] - left[1] < 100e6 + WORKSPACE, left
    assert left[1] - min(left[1:]) < 10e6, left
    assert theirs.all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_first_engine_gives_the_librarys_workspace_back_too_where_nobody_else_has_tensors() -> None:
    subprocess.run([sys.executable, "-c", FIRST_ON_A_GPU], check=True, cwd=Path(__file__).parents[2], timeout=300)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_error_of_a_start_that_lost_the_device_can_be_read() -> None:
    child = subprocess.run([sys.executable, "-c", LOST_DEVICE], capture_output=True, text=True, check=False)
    assert "read: AcceleratorError" in child.stdout, child.stderr[-2000:]
