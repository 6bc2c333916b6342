"""The platform torch, and what devices tell of their memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.devices import PLATFORMS
from quire.foundation.errors import ConfigError
from quire.models import transfer
from quire.platforms import select_platform
from quire.platforms.any_torch import TorchPlatform
from tests.models import checkpoints

GIB = 1024**3


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_on_a_cpu() -> None:
    platform, cpu = select_platform("torch:cpu"), select_platform("cpu")
    assert (platform.plain_torch, platform.runs_ahead) == (True, False)
    assert platform.set_up(2) == torch.device("cpu")
    assert platform.device_name() == "torch:cpu (2 threads)"
    assert platform.total_bytes() == cpu.total_bytes()
    assert platform.free_bytes() <= platform.total_bytes()
    assert platform.growth(lambda: torch.zeros(100)) == 0
    platform.release()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_what_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match=r"device=torch:xpu, but torch .* has no accelerator here"):
        select_platform("torch:xpu").set_up(None)


# What torch's module of each kind of device has: (its functions, free and total bytes, growth by work that takes 5).
MODULES: dict[str, tuple[dict[str, Any], tuple[int, int] | None, int]] = {
    "xpu": (
        {
            "mem_get_info": lambda _: (3 * GIB, 8 * GIB), "memory_reserved": lambda: 10, "empty_cache": lambda: None,
            "max_memory_reserved": lambda: 15, "reset_peak_memory_stats": lambda: None,
        },
        (3 * GIB, 8 * GIB), 5,
    ),
    "mps": (
        {
            "recommended_max_memory": lambda: 8 * GIB, "empty_cache": lambda: None,
            "driver_allocated_memory": iter([GIB, GIB, GIB, GIB + 5]).__next__,
        },
        (7 * GIB, 8 * GIB), 5,
    ),
    "one that tells nothing": ({}, None, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_memory_is_what_the_device_tells(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functions, memory, growth = MODULES[name]
    platform = TorchPlatform("xpu")
    platform._device, platform._module = SimpleNamespace(type="xpu"), SimpleNamespace(**functions)  # type: ignore[assignment]
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    if memory is None:
        assert platform._memory() is None
        assert platform.free_bytes() == pytest.approx(platform._host.free_bytes() // 4, rel=0.1)
        assert platform.total_bytes() == platform._host.total_bytes()
    else:
        assert (platform.free_bytes(), platform.total_bytes()) == memory
    assert platform.growth(lambda: None) == growth


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_an_nvidia_gpu_as_any_device() -> None:
    platform = select_platform("torch:cuda")
    device = platform.set_up(None)
    assert device.type == "cuda"
    assert platform.device_name().startswith("torch:cuda (")
    assert 0 < platform.free_bytes() <= platform.total_bytes()

    def work() -> None:
        torch.empty(1 << 28, dtype=torch.uint8, device=device)

    assert 1 << 28 <= platform.growth(work) < 1 << 29


class Elsewhere(TorchPlatform):
    """One that a package brings."""

    name = "elsewhere"

    def __init__(self, what: str = "") -> None:
        assert what in ("", "left")
        super().__init__("cpu")


@pytest.mark.parametrize("device", ["elsewhere", "elsewhere:left"])
def test_a_platform_of_ones_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLATFORMS, "_targets", dict(PLATFORMS._targets))
    PLATFORMS.register("elsewhere", Elsewhere)
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM(device=device, num_gpu_blocks_override=100) as llm:
        (found,) = llm.generate(["Hello"], params, use_tqdm=False)
    with LLM(device="torch:cpu", num_gpu_blocks_override=100) as llm:
        (expected,) = llm.generate(["Hello"], params, use_tqdm=False)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_weights_go_through_a_buffer_where_files_cannot_be_read_in_place(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for devices whose memory is not the CPU's: the same numbers."""
    folder = checkpoints.save(checkpoints.make("Qwen3", head_dim=16, vocab_size=199), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, detokenize=False, ignore_eos=True)
    options: dict[str, Any] = {"device": "torch:cpu", "skip_tokenizer_init": True, "max_model_len": 32}
    answers = []
    for in_place in (True, False):
        monkeypatch.setattr(transfer, "Lane", partial(transfer.Lane, in_place=in_place))
        with LLM(str(folder), quantization=quantization, **options) as llm:
            (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        answers.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert answers[0] == answers[1]
