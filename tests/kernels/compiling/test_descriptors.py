"""Descriptions of tensors are those that Triton makes, which looks at the first of a kind alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Gluons
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton import descriptors
from quire.kernels.triton.descriptors import described

LAYOUT = NVMMASharedLayout(128, 16, 2)


def own(of: object) -> dict[str, object]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(of).items()}


@pytest.fixture(autouse=True)
def nothing_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_looked_at", {})


@pytest.mark.parametrize("rows", [1, 3, 3000])
@pytest.mark.parametrize("kind", [TensorDescriptor, Gluons])
def test_what_is_made_is_what_triton_makes(kind: type, rows: int) -> None:
    layout = LAYOUT if kind is Gluons else None
    for _ in range(3):
        x = torch.zeros(rows, 128, dtype=torch.bfloat16)
        theirs = kind.from_tensor(x, [64, 64], *([layout] if layout else []))
        ours = own(described(kind, x, (64, 64), layout))
        assert ours.pop("base") is x
        assert ours.pop("launched_as") is not None
        wanted = own(theirs)
        assert wanted.pop("base") is x
        assert ours == wanted


def test_those_are_alike_for_which_a_kernel_is_compiled_alike() -> None:
    x = torch.zeros(8, 128, dtype=torch.bfloat16)
    alike = {
        described(Gluons, torch.zeros(m, 128, dtype=torch.bfloat16), (64, 64), LAYOUT).launched_as for m in (1, 2, 7)
    }
    others = {
        described(Gluons, x, (32, 64), LAYOUT).launched_as,
        described(Gluons, x.half(), (64, 64), LAYOUT).launched_as,
        described(Gluons, x, (64, 64), NVMMASharedLayout(64, 16, 2)).launched_as,
        described(TensorDescriptor, x, (64, 64)).launched_as,
    }
    assert len(alike) == 1
    assert len(others - alike) == 4


def test_what_triton_refuses_is_refused_the_second_time_too() -> None:
    x = torch.zeros(9 * 128, dtype=torch.bfloat16)
    described(TensorDescriptor, x[:1024].view(8, 128), (8, 64))
    for _ in range(2):
        with pytest.raises(AssertionError, match="16-byte aligned"):
            described(TensorDescriptor, x[4 : 4 + 1024].view(8, 128), (8, 64))
        with pytest.raises(AssertionError, match="shape must be positive"):
            described(TensorDescriptor, x[:0].view(0, 128), (8, 64))
