"""Each head's rows times the head's own matrix, for few rows: a program has some outputs of one head, and of the matrix
all that they need, which it sends for before it waits for what makes the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.triton.latent import turn_and_write
from quire.kernels.triton.launch import cdiv, dot_width, has_pdl, next_power_of_2

HEADS = 16  # whose queries a program turns
TILE = 8192  # elements of a matrix that a program has, if that makes 16 outputs or more


@triton.jit
def _times_own(
    number, x_ptr, weight_ptr, out_ptr, num_tokens, x_stride, x_head_stride, weight_head_stride, k_stride, n_stride,
    out_stride, out_head_stride,
    K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    head = (number // TILES).to(tl.int64)
    n, k, token = number % TILES * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    at = weight_ptr + head * weight_head_stride + k[:, None] * k_stride + n[None, :] * n_stride
    weight = tl.load(at, (k < K)[:, None] & (n < N)[None, :], 0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    there = (token < num_tokens)[:, None]
    rows = x_ptr + token[:, None] * x_stride + head * x_head_stride + k[None, :]
    y = tl.dot(tl.load(rows, there & (k < K)[None, :], 0.0), weight)
    to = out_ptr + token[:, None] * out_stride + head * out_head_stride + n[None, :]
    tl.store(to, y.to(out_ptr.dtype.element_ty), there & (n < N)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _by_head_kernel(
    x_ptr, weight_ptr, out_ptr, num_tokens, x_stride, x_head_stride, weight_head_stride, k_stride, n_stride,
    out_stride, out_head_stride,
    K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    _times_own(
        tl.program_id(0), x_ptr, weight_ptr, out_ptr, num_tokens, x_stride, x_head_stride, weight_head_stride,
        k_stride, n_stride, out_stride, out_head_stride, K, N, ROWS, BLOCK_K, BLOCK_N, PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "products"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _latent_queries_kernel(
    q_ptr, keys_ptr, out_ptr, num_tokens, products, key_head_stride, k_stride, n_stride, latent_ptr, weight_ptr,
    cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr, q_stride, q_head_stride, latent_stride, out_stride,
    out_head_stride, cos_sin_stride, block_stride, eps,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first `products` programs multiply; the others turn and write, some of a token each."""
    number = tl.program_id(0)
    GROUPS: tl.constexpr = 1 + (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if number < products:
        _times_own(
            number, q_ptr, keys_ptr, out_ptr, num_tokens, q_stride, q_head_stride, key_head_stride, k_stride, n_stride,
            out_stride, out_head_stride, NOPE, RANK, ROWS, BLOCK_K, BLOCK_N, PDL,
        )  # fmt: skip
    else:
        token, group = ((number - products) // GROUPS).to(tl.int64), (number - products) % GROUPS
        turn_and_write(
            token, group, q_ptr + NOPE, latent_ptr, out_ptr + RANK, weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr,
            cache_ptr, q_stride, q_head_stride, latent_stride, out_stride, out_head_stride, cos_sin_stride,
            block_stride, eps, NUM_HEADS, RANK, ROPE, BLOCK_SIZE, BLOCK_HEADS, BLOCK_RANK, BLOCK_HALF, INTERLEAVED,
            PDL,
        )  # fmt: skip


def _tile(tokens: int, k: int) -> dict[str, int]:
    """How a product with matrices [k, n] is cut up."""
    block_k = dot_width(k)
    block_n = min(max(TILE // block_k, 16), 64)
    return {"ROWS": dot_width(tokens), "BLOCK_K": block_k, "BLOCK_N": block_n}


def by_head(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See `quire.kernels.attention.latent`; up to 64 tokens, elements of 16 bits."""
    (tokens, heads, k), n = x.shape, weight.shape[2]
    tile, pdl = _tile(tokens, k), has_pdl(x.device)
    _by_head_kernel[(heads * cdiv(n, tile["BLOCK_N"]),)](
        x, weight, out, tokens, x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1), K=k, N=n,
        **tile, PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip


def latent_queries(
    q: torch.Tensor,
    latent: torch.Tensor,
    keys: torch.Tensor,
    out: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    interleaved: bool,
) -> None:
    """See `quire.kernels.attention.latent`; up to 64 tokens, elements of 16 bits."""
    (tokens, heads, _), (nope, rank), (weight, eps) = q.shape, keys.shape[1:], norm
    rope = out.shape[2] - rank
    tile, pdl = _tile(tokens, nope), has_pdl(q.device)
    products = heads * cdiv(rank, tile["BLOCK_N"])
    _latent_queries_kernel[(products + tokens * (1 + cdiv(heads, HEADS)),)](
        q, keys, out, tokens, products, *keys.stride(), latent, weight, cos_sin, positions, slots, cache, q.stride(0),
        q.stride(1), latent.stride(0), out.stride(0), out.stride(1), cos_sin.stride(0), cache.stride(0), eps,
        NUM_HEADS=heads, NOPE=nope, RANK=rank, ROPE=rope, BLOCK_SIZE=cache.shape[2], **tile, BLOCK_HEADS=HEADS,
        BLOCK_RANK=next_power_of_2(rank), BLOCK_HALF=next_power_of_2(rope // 2), INTERLEAVED=interleaved, PDL=pdl,
        launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
