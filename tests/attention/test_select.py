from __future__ import annotations

import logging

import pytest

from quire.attention.select import select
from quire.foundation.errors import ConfigError
from tests.attention.test_triton_backend import spec


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'magic'.*auto, triton, torch_cpu"):
        select("magic", spec())


def test_a_refusal_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match=r"triton .needs a CUDA device, not cpu"):
        select("triton", spec())
    assert "triton refused: needs a CUDA device" in caplog.text


def test_auto_takes_the_cpu_backend_on_a_cpu() -> None:
    pytest.importorskip("quire.attention.torch_cpu")
    assert select("auto", spec()).name == "torch_cpu"
    assert select("torch_cpu", spec()).name == "torch_cpu"


def test_a_device_without_a_backend_is_an_error() -> None:
    with pytest.raises(ConfigError, match="meta"):
        select("auto", spec("meta"))
