"""x @ weight.T for a handful of rows: reading the weight once, as fast as memory gives it, is the whole job.

Each program owns BLOCK_N outputs and walks along K. With programmatic dependent launch the one-row kernel fetches its
first tile of the weight, which no kernel of a step writes, before it waits for its predecessor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import has_pdl


@triton.jit
def _vector_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, N, weight_stride,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row on the ordinary cores: products stay spread over K until one reduction at the end."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight_ptr + n.to(tl.int64)[:, None] * weight_stride
    in_n = (n < N)[:, None]
    weight = tl.load(rows + k[None, :], in_n & (k < K)[None, :], 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        here = start + k
        ahead = here + BLOCK_K
        now = weight.to(tl.float32)
        weight = tl.load(rows + ahead[None, :], in_n & (ahead < K)[None, :], 0.0)
        acc += tl.load(x_ptr + here, here < K, 0.0).to(tl.float32)[None, :] * now
    y = tl.sum(acc, axis=1)
    if BIAS:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), n < N)


@triton.jit(do_not_specialize=["M"])
def _matrix_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, x_stride, weight_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to 16 rows on the matrix units, the weight as the tall operand; the warps share K (SPLIT), not outputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    at = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]  # [split, k]
    rows = weight_ptr + n.to(tl.int64)[None, :, None] * weight_stride + at[:, None, :]  # [split, n, k]
    lines = x_ptr + m[None, :, None] * x_stride + at[:, None, :]  # [split, m, k]
    in_n, in_m = (n < N)[None, :, None], (m < M)[None, :, None]
    STEP: tl.constexpr = SPLIT * BLOCK_K
    EVEN: tl.constexpr = K % STEP == 0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([SPLIT, BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        if EVEN:
            weight = tl.load(rows + start, in_n, 0.0)
            x = tl.load(lines + start, in_m, 0.0)
        else:
            in_k = (start + at < K)[:, None, :]
            weight = tl.load(rows + start, in_n & in_k, 0.0)
            x = tl.load(lines + start, in_m & in_k, 0.0)
        acc = tl.dot(weight, tl.permute(x, (0, 2, 1)), acc, input_precision=PRECISION)
    y = tl.sum(acc, axis=0)  # [outputs, rows]
    if BIAS:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + m[None, :] * N + n[:, None], y.to(out_ptr.dtype.element_ty), (m < M)[None, :] & (n < N)[:, None])


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    vector: tuple[int, int, int] | None = None,
    matrix: tuple[int, int, int, int, int] | None = None,
) -> torch.Tensor:
    """See `quire.kernels.skinny_gemm`; `vector` and `matrix` are for measuring."""
    (m, k), n = x.shape, weight.shape[0]
    pdl = has_pdl(x.device)
    bias_or_any = weight if bias is None else bias
    if matrix is None and m == 1:
        block_n, block_k, num_warps = vector or ((4, 512, 2) if k <= 1024 else (4, 1024, 4))
        _vector_kernel[(triton.cdiv(n, block_n),)](
            x, weight, bias_or_any, out, n, weight.stride(0), K=k, BLOCK_N=block_n, BLOCK_K=block_k,
            BIAS=bias is not None, PDL=pdl, num_warps=num_warps, launch_pdl=pdl,
        )  # fmt: skip
    else:
        # Few outputs make few programs: let each ask for more at once.
        block_n, block_k, split, num_warps, num_stages = matrix or (16, 128 if n <= 2048 else 64, 4, 4, 4)
        _matrix_kernel[(triton.cdiv(n, block_n),)](
            x, weight, bias_or_any, out, m, n, x.stride(0), weight.stride(0), K=k, BLOCK_M=8 if m <= 8 else 16,
            BLOCK_N=block_n, BLOCK_K=block_k, SPLIT=split, BIAS=bias is not None, STAGES=num_stages,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", PDL=pdl, num_warps=num_warps, launch_pdl=pdl,
        )  # fmt: skip
    return out
