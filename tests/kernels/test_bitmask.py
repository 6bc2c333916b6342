from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.sampling.bitmask import apply_bitmask


def masks(lines: int, vocab: int, density: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(allowed, bool [lines, vocab]; bits, int32 [lines, words], garbage behind the vocabulary)."""
    rng = np.random.default_rng(seed)
    allowed = rng.random((lines, -(-vocab // 32) * 32)) < density
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(allowed[:, :vocab]), torch.from_numpy(bits)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 5000])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
def test_what_is_not_allowed_becomes_minus_infinity(device: torch.device, vocab: int, density: float) -> None:
    logits = torch.randn(6, vocab, device=device)
    before = logits.clone()
    rows = [1, 4, 5]
    allowed, bits = masks(3, vocab, density)
    apply_bitmask(logits, torch.tensor(rows, dtype=torch.int32, device=device), bits.to(device))
    expected = before.clone()
    expected[rows] = before[rows].masked_fill(~allowed.to(device), -torch.inf)
    assert torch.equal(logits, expected)


def test_rows_of_a_wider_tensor_and_a_part_of_the_masks(device: torch.device) -> None:
    whole = torch.randn(5, 200, device=device)
    logits, before = whole[:, :100], whole.clone()
    allowed, bits = masks(4, 100, 0.3)
    rows = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    apply_bitmask(logits, rows[1:3], bits.to(device)[1:3])
    assert torch.equal(whole[:, 100:], before[:, 100:])
    expected = before[:, :100].clone()
    expected[1:3] = expected[1:3].masked_fill(~allowed[1:3].to(device), -torch.inf)
    assert torch.equal(logits, expected)


def test_no_rows(device: torch.device) -> None:
    logits = torch.randn(2, 50, device=device)
    before = logits.clone()
    nothing = torch.zeros(0, 2, dtype=torch.int32, device=device)
    apply_bitmask(logits, nothing[:, 0], nothing)
    assert torch.equal(logits, before)
