"""x @ weight.T with what stands around it in a decoder layer: the norm before it, the gate or the residual sum after.

On a GPU the rows of a decode batch go through kernels that do all of it; many rows go through the library, whose
products are then wide enough that the passes around them hardly count, but for the gate: it has a kernel of its own
there too. On a CPU everything is done in place, one step after another.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_cpu, on_cuda
from quire.kernels.elementwise.activation import silu_and_mul
from quire.kernels.elementwise.norm import rms_norm, rms_norm_reference
from quire.kernels.gemm import cpu_linear, decode_gemm, wide_gemm

EVEN = 8  # outputs, of whose multiples the library has its best kernels


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T + bias [n] → [m, n], accumulated in float32.

    norm: (weight [k], eps) of an RMS norm that x goes through first. gated: weight is [gate | up], [2n, k], bias
    likewise, and the result silu(gate) * up (SwiGLU: Shazeer, 2020).
    residual [m, n], contiguous, no part of x: `residual += result` in place, and `residual` is returned.
    Otherwise the result goes into `out` (rows contiguous, of any float dtype) if given, else into a contiguous tensor
    of `out_dtype`, by default x's. Neither goes together with `gated`, nor with `residual`. An `out` of x's dtype
    without a norm is for a part of a sum over ranks, and is cut up as products are that are added to a residual.

    The weights must not be written by a kernel launched just before: they are read ahead of its end.
    """
    own_output = out is not None or out_dtype is not None
    if gated + (residual is not None) + own_output > 1:
        raise ValueError("a gated result, a residual and an output of one's own exclude one another")
    summed = decode_gemm.adds_up(norm, residual, out)
    if norm is not None and x.dtype == torch.float16:  # x * norm's weight, not yet divided, may leave its range
        x, norm = rms_norm(x, *norm), None
    alone = bias is None and residual is None
    plan = decode_gemm.plan(x, weight, gated=gated, residual=summed, alone=alone)
    if plan is not None:
        return decode_gemm.linear(x, weight, bias, norm, gated, residual, out_dtype, out, plan)
    if norm is not None:
        x = rms_norm(x, *norm)
    if gated and bias is None and wide_gemm.pays(x, weight):
        return wide_gemm.gated(x, weight)
    if gated:
        return silu_and_mul(_product(x, weight, bias))
    if on_cuda(x) and residual is not None:
        return _add_on_gpu(x, weight, bias, residual)
    if on_cuda(x) and own_output:
        return _wide_on_gpu(x, weight, bias, out_dtype, out)
    y = _product(x, weight, bias)
    if residual is not None:
        return residual.add_(y)
    return out.copy_(y) if out is not None else y.to(out_dtype or x.dtype)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return cpu_linear.linear(x, weight, bias) if on_cpu(x) else torch.nn.functional.linear(x, weight, bias)


def _add_on_gpu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    residual.addmm_(x, weight.t())  # the library's kernel adds before it rounds: no pass of its own
    return residual if bias is None else residual.add_(bias)


def _wide_on_gpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """In a dtype of its own: logits keep what the sum has gained.

    Of an odd number of outputs the library has kernels of an earlier generation alone, which take three to five times
    as long: the last few are then a product of their own, if rows of results lie such that it helps.
    """
    n = len(weight)
    if out is None:
        out = torch.empty((len(x), n), dtype=out_dtype, device=x.device)
    even = n - n % EVEN if out.stride(0) % EVEN == 0 else n
    for part in (slice(even), slice(even, n)) if 0 < even < n else (slice(n),):
        if out.dtype == x.dtype:
            torch.mm(x, weight[part].t(), out=out[:, part])
        else:
            torch.mm(x, weight[part].t(), out_dtype=out.dtype, out=out[:, part])
    return out if bias is None else out.add_(bias)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in float32; `residual` is left as it is."""
    x = x.float() if norm is None else rms_norm_reference(x.float(), *norm)
    y = x @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.float()
