"""Attention within whole prompts: every backend against plain attention, row by row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.attention.base import AttentionSpec, LayerCache, PromptAttention, Scores
from quire.attention.prompt_torch import TorchPromptAttention
from quire.attention.select import select_for_prompts
from quire.foundation.errors import ConfigError
from quire.kernels.attention.prompt import attend_reference
from quire.kernels.dispatch import INTERPRETED

ROWS = [[1], [5, 5, 5], [7, 3, 40, 40, 1, 129, 64, 33, 3, 7], [300, 2]]
HEADS = [(4, 4, 32), (6, 2, 16), (3, 3, 12), (2, 1, 80)]
CASES = [
    pytest.param("sdpa", "cpu", torch.float32, id="sdpa-cpu"),
    pytest.param("triton", "cpu", torch.float32, id="triton-interpreted", marks=pytest.mark.skipif(
        not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    *(pytest.param(name, "cuda", dtype, id=f"{name}-cuda-{str(dtype)[6:]}", marks=[pytest.mark.gpu, pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU")])
      for name in ("sdpa", "triton") for dtype in (torch.float32, torch.float16, torch.bfloat16)),
]  # fmt: skip


def make(name: str, spec: AttentionSpec) -> PromptAttention:
    if name == "sdpa":
        return TorchPromptAttention(spec)
    from quire.attention.prompt_triton import TritonPromptAttention

    return TritonPromptAttention(spec)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", ROWS, ids=str)
@pytest.mark.parametrize(("name", "device", "dtype"), CASES)
def test_rows_attend_to_themselves_alone(
    name: str, device: str, dtype: torch.dtype, lengths: list[int], heads: tuple[int, int, int]
) -> None:
    check(name, device, dtype, lengths, heads)


@pytest.mark.parametrize("window", [1, 5, 65])
@pytest.mark.parametrize("lengths", ROWS[1:], ids=str)
@pytest.mark.parametrize(("name", "device", "dtype"), CASES)
def test_windows_to_either_side(name: str, device: str, dtype: torch.dtype, lengths: list[int], window: int) -> None:
    check(name, device, dtype, lengths, HEADS[1], window=window)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("name", "device", "dtype"), CASES)
def test_the_last_tokens_are_seen_by_none(name: str, device: str, dtype: torch.dtype, window: int | None) -> None:
    """As those are that ColBERT's queries are filled up with."""
    check(name, device, dtype, [40, 7, 33, 64], HEADS[1], window=window, num_keys=[30, 7, 10, 60])


def check(
    name: str,
    device: str,
    dtype: torch.dtype,
    lengths: list[int],
    heads: tuple[int, int, int],
    window: int | None = None,
    num_keys: list[int] | None = None,
) -> None:
    num_heads, num_kv_heads, dim = heads
    backend = make(name, spec(device, dtype, heads, window))
    torch.manual_seed(1)
    tokens = sum(lengths)
    qkv = torch.randn(tokens, num_heads + 2 * num_kv_heads, dim, device=device).to(dtype)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)  # of strides of their own
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    keys = None if num_keys is None else np.array(num_keys, np.int32)
    plan = backend.plan(np.array(lengths, np.int32), starts, keys)
    out = backend.run(q, LayerCache(k.unsqueeze(2), v.unsqueeze(2)), plan, dim**-0.5)
    counts = None if keys is None else torch.from_numpy(keys).to(device)
    expected = attend_reference(q, k, v, starts, dim**-0.5, window=window or 0, num_keys=counts)
    assert out.dtype == dtype
    assert not expected.isnan().any()
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    assert (out.float() - expected).abs().max() < tolerance


def spec(device: str, dtype: torch.dtype, heads: tuple[int, int, int], window: int | None = None) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        block_size=512,
        dtype=dtype,
        kv_dtype=dtype,
        device=torch.device(device),
        max_rows=16,
        max_tokens=1024,
        max_seq_len=512,
        scores=Scores(window or 0),
    )


def test_selection() -> None:
    assert select_for_prompts("auto", spec("cpu", torch.float32, (4, 4, 32)), "cpu").name == "sdpa"
    assert select_for_prompts("auto", spec("cpu", torch.float32, (4, 4, 32), window=5), "cpu").name == "sdpa"
    with pytest.raises(ConfigError, match="products"):
        select_for_prompts("auto", replace(spec("cpu", torch.float32, (4, 4, 32)), scores=Scores(softcap=3.0)), "cpu")
    with pytest.raises(ConfigError, match="unknown"):
        select_for_prompts("torch_cpu", spec("cpu", torch.float32, (4, 4, 32)), "cpu")
