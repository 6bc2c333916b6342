"""The tests run on the CPU, on a GPU, in plain torch on both, and with TRITON_INTERPRET=1 on the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.kernels.dispatch import INTERPRETED, plain_torch

KINDS = [
    "cpu",
    "plain",
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("plain, cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if "cuda" in request.param and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if "plain" in request.param and INTERPRETED:
        pytest.skip("the interpreter is for Triton")
    torch.manual_seed(0)
    with plain_torch("plain" in request.param):
        yield torch.device("cuda" if "cuda" in request.param else "cpu")
