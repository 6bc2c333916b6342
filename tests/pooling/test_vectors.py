"""Small floats as PyTorch makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.server.pooling.vectors import to_bytes

DTYPES: dict[Any, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_floats(dtype: Any) -> None:
    """Every float16 number (so every tie too), and random ones of all sizes."""
    dice = np.random.default_rng(0)
    exact = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    any_size = dice.standard_normal(20_000) * np.exp2(dice.integers(-30, 20, 20_000))
    data = np.concatenate([exact, any_size.astype(np.float32)])
    largest = torch.finfo(DTYPES[dtype]).max if dtype == "fp8_e4m3" else torch.inf  # torch 2.11 makes more than it NaN
    wanted = torch.from_numpy(data).clamp(-largest, largest).to(DTYPES[dtype])
    kind = torch.int8 if dtype.startswith("fp8") else torch.int16
    found = torch.frombuffer(bytearray(to_bytes(data, dtype, "native")), dtype=kind)
    is_number = ~torch.isnan(wanted.float())
    assert torch.equal(found[is_number], wanted.view(kind)[is_number])
    assert torch.isnan(found.view(DTYPES[dtype]).float()[~is_number]).all()
