"""The tests run on the CPU (plain torch), on a GPU, and with TRITON_INTERPRET=1 on the Triton kernels themselves."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(0)
    return torch.device(request.param)
