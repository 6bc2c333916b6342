"""From the residual to attention's inputs: on the CPU, and as one kernel where there is a device for it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from quire.kernels.attention.qkv import _in_one, qkv_rope_write
from quire.kernels.attention.rope import QkvTarget
from quire.kernels.elementwise.norm import rms_norm
from tests.kernels.compare import assert_near
from tests.kernels.test_rope import MAX_POSITION, cos_sin_table, rotate

pytest.importorskip("triton")

from tests.kernels.gluon import ON_DEVICE, TESTED, assert_assembles_well

PAGE = 16
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


class Case(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm: tuple[torch.Tensor, float]
    place: QkvTarget


def make(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    hidden: int,
    device: torch.device,
    *,
    bias: bool,
    normed: bool,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> Case:
    """Slots in random order, a few of them nowhere; caches full of sevens."""
    lines = (heads + 2 * kv_heads) * dim
    blocks = tokens // PAGE + 3
    slots = torch.randperm(blocks * PAGE, device=device)[:tokens].int()
    if tokens > 1:
        slots[tokens // 2 :: 97] = -1
    pool = torch.full((2, blocks, kv_heads, PAGE, dim), 7.0, device=device).to(kv_dtype or dtype)
    gains = [torch.randn(dim, device=device).to(dtype) for _ in range(2)] if normed else [None, None]
    return Case(
        (torch.randn(tokens, hidden, device=device) * 3).to(dtype),
        (torch.randn(lines, hidden, device=device) * 2 / hidden**0.5).to(dtype),
        torch.randn(lines, device=device).to(dtype) if bias else None,
        (torch.rand(hidden, device=device).to(dtype) + 0.5, 1e-5),
        QkvTarget(
            cos_sin_table(dim, device), torch.randint(0, MAX_POSITION, (tokens,), device=device).int(), slots, pool[0],
            pool[1], heads, kv_heads, dim, *gains,
        ),
    )  # fmt: skip


def rms(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double()


def exact(x: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of normed x, [tokens, heads, dim], in float64."""
    p = case.place
    y = x.double() @ case.weight.double().T + (0 if case.bias is None else case.bias.double())
    heads = y.view(len(x), -1, p.head_dim).split([p.num_heads, p.num_kv_heads, p.num_kv_heads], dim=1)
    q, k, v = heads
    if p.q_weight is not None and p.k_weight is not None:
        q, k = rms(q, p.q_weight, p.eps), rms(k, p.k_weight, p.eps)
    return rotate(q, p.positions, p.cos_sin), rotate(k, p.positions, p.cos_sin), v


def written(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What lies at the slots that are somewhere, [tokens, kv_heads, dim]; everywhere else there are sevens."""
    lines = cache.float().transpose(1, 2).flatten(0, 1)
    real = slots[slots >= 0].long()
    rest = torch.ones(len(lines), dtype=torch.bool, device=cache.device)
    rest[real] = False
    assert bool((lines[rest] == 7.0).all())
    return lines[real]


def check(q: torch.Tensor, x: torch.Tensor, case: Case) -> None:
    """x: what the product took."""
    expected_q, *kv = exact(x, case)
    assert_near(q, expected_q, x.dtype)
    real = case.place.slots >= 0
    for cache, expected in zip((case.place.k_cache, case.place.v_cache), kv, strict=True):
        stored, expected = written(cache, case.place.slots), expected[real]
        if cache.dtype.itemsize > 1:
            assert_near(stored, expected, x.dtype)
            continue
        largest = torch.finfo(cache.dtype).max
        narrow = expected.float().clamp(-largest, largest).to(cache.dtype).float()
        assert (stored != narrow).float().mean() < 0.01  # a rounding at the border, here and there
        torch.testing.assert_close(stored, narrow, rtol=0.13 if cache.dtype == torch.float8_e4m3fn else 0.26, atol=0.02)


@pytest.mark.parametrize(("bias", "normed"), [(False, True), (True, False)])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), [(37, 4, 2, 64), (1500, 3, 1, 128)])
def test_whichever_path(
    device: torch.device, tokens: int, heads: int, kv_heads: int, dim: int, bias: bool, normed: bool
) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    case = make(tokens, heads, kv_heads, dim, 192, device, bias=bias, normed=normed, dtype=dtype)
    q = qkv_rope_write(*case)
    x = rms(case.x.double(), *case.norm)
    if dtype == torch.bfloat16:
        expected_q, _, _ = exact(x, case)
        assert torch.linalg.vector_norm(q.double() - expected_q) / torch.linalg.vector_norm(expected_q) <= 1e-2
    else:
        check(q, x.float(), case)


@TESTED
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "heads", "kv_heads", "dim", "bias", "normed"),
    [("bf16", "bf16", 16, 8, 128, False, True), ("fp16", "fp8e4nv", 14, 2, 64, True, False)],
)
def test_it_assembles_well(
    dtype: str, kv_dtype: str, heads: int, kv_heads: int, dim: int, bias: bool, normed: bool, tmp_path: Path
) -> None:
    from quire.kernels.attention.triton.qkv_sm90 import _qkv_sm90_kernel
    from quire.kernels.gemm.triton import pipeline_sm90 as pipeline

    pointers = ("bias_ptr", "q_weight_ptr", "k_weight_ptr", "q_ptr")
    strides = ("k_block_stride", "k_head_stride", "v_block_stride", "v_head_stride")
    weight_desc = f"tensordesc<{dtype}[{pipeline.BLOCK_N // 64}, 4, 4, 2, {pipeline.BLOCK_K}],{pipeline.INTERLEAVED!r}>"
    x_desc = f"tensordesc<{dtype}[{pipeline.BLOCK_M // 2}, {pipeline.BLOCK_K}],{pipeline.SWIZZLED!r}>"
    types = {"x_desc": x_desc, "weight_desc": weight_desc, "eps": "fp32"}
    types |= dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), f"*{kv_dtype}")
    types |= dict.fromkeys(("positions_ptr", "slots_ptr"), "*i32") | dict.fromkeys((*strides, "M", "K"), "i32")
    types["cos_sin_ptr"] = "*fp32"
    constants = {name: value for name, value in pipeline.OPTIONS.items() if name != "num_warps"}
    constants |= {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "PAGE": PAGE, "BIAS": bias, "NORM": normed}
    constants["BLOCK_N"] = pipeline.BLOCK_N
    aligned = (*pointers, *strides, "cos_sin_ptr", "k_cache_ptr", "v_cache_ptr")
    assert_assembles_well(_qkv_sm90_kernel, types, constants | {"PDL": True}, aligned, tmp_path)


class TestOnDevice:
    pytestmark = ON_DEVICE

    @pytest.mark.parametrize(
        ("tokens", "heads", "kv_heads", "dim", "hidden", "bias", "normed", "dtype"),
        [
            (3001, 16, 8, 128, 1024, False, True, torch.bfloat16),
            (2048, 32, 8, 128, 512, False, False, torch.bfloat16),
            (1025, 14, 2, 64, 896, True, False, torch.bfloat16),
            (777, 6, 6, 64, 64, True, True, torch.float16),
            (129, 5, 1, 128, 200, True, True, torch.float16),
            (1, 3, 1, 64, 8, False, True, torch.bfloat16),
        ],
    )
    def test_edges(
        self, tokens: int, heads: int, kv_heads: int, dim: int, hidden: int, bias: bool, normed: bool,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """One tile and several a block; tiles and steps that are cut off; tiles of queries, keys and values at once."""
        torch.manual_seed(tokens)
        device = torch.device("cuda")
        case = make(tokens, heads, kv_heads, dim, hidden, device, bias=bias, normed=normed, dtype=dtype)
        self.run(case)

    @pytest.mark.parametrize("kv_dtype", FP8, ids=str)
    @pytest.mark.parametrize("dim", [64, 128])
    def test_8_bits(self, dim: int, kv_dtype: torch.dtype) -> None:
        torch.manual_seed(dim)
        case = make(700, 4, 2, dim, 256, torch.device("cuda"), bias=True, normed=False, kv_dtype=kv_dtype)
        assert case.bias is not None
        case.bias[-dim:] *= torch.finfo(kv_dtype).max  # of a value head: beyond what the type holds
        self.run(case)
        assert case.place.v_cache.float().abs().max() == torch.finfo(kv_dtype).max

    def test_prompts_take_it(self) -> None:
        """Through the door: what the norm before it rounds is all that may differ."""
        case = make(2048, 16, 8, 128, 256, torch.device("cuda"), bias=False, normed=True)
        assert _in_one(case.x, case.weight, case.bias, case.place)
        q, normed = qkv_rope_write(*case), rms_norm(case.x, *case.norm)
        check(q, normed, case)

    def run(self, case: Case) -> None:
        from quire.kernels.attention.triton import qkv_sm90

        place = case.place
        poison = torch.full((len(case.x), place.num_heads, place.head_dim), float("nan"), device="cuda").to(case.x)
        del poison  # its memory is where q will be
        q = qkv_sm90.qkv_rope_write(case.x, case.weight, case.bias, place)
        check(q, case.x, case)
