from __future__ import annotations

import logging

import pytest
import torch

from quire.attention.select import select
from quire.foundation.errors import ConfigError
from quire.kernels.dispatch import plain_torch
from tests.attention.test_triton_backend import spec


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'magic'.*auto, triton, triton_mla, torch_cpu, sdpa, flashinfer"):
        select("magic", spec(), "cpu")


def test_a_refusal_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match=r"triton .needs a CUDA device, not cpu"):
        select("triton", spec(), "cpu")
    assert "triton refused: needs a CUDA device" in caplog.text


def test_auto_takes_the_cpu_backend_on_a_cpu() -> None:
    pytest.importorskip("quire.attention.torch_cpu")
    assert select("auto", spec(), "cpu").name == "torch_cpu"
    assert select("torch_cpu", spec(), "cpu").name == "torch_cpu"


def test_other_platforms_get_plain_torchs() -> None:
    assert select("auto", spec(), "torch").name == "sdpa"
    assert select("auto", spec(), "somebody's").name == "sdpa"


def test_what_nobody_serves_is_refused_with_each_ones_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        select("auto", spec(kv_dtype=torch.float8_e4m3fn), "torch")
    said = str(caught.value)
    assert said.index("sdpa (no cache of torch.float8_e4m3fn on cpu)") < said.index("triton (needs a CUDA device")
    assert "flashinfer (" in said
    assert "flash_attn (" in said


def test_a_forced_platform_has_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with plain_torch(), pytest.raises(ConfigError, match=r"triton .needs the platform cuda: this one is plain torch"):
        select("triton", spec("cuda"), "torch")
