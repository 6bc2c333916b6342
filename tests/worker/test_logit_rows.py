"""Logits lie where the library has fast kernels for, whatever the vocabulary."""

from __future__ import annotations

import pytest
import torch

from quire.worker.logit_rows import LINE, logit_rows


@pytest.mark.parametrize("vocab", [1, 32_000, 50_257, 151_665])
def test_rows_begin_on_multiples(vocab: int) -> None:
    rows = logit_rows(3, vocab, torch.device("cpu"))
    assert rows.shape == (3, vocab)
    assert rows.stride(0) % LINE == 0
    assert rows.stride(0) - vocab < LINE
    assert rows.stride(1) == 1
