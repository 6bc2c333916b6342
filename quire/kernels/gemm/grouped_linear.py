"""x @ weight.T for a weight in codes (`codes.Codes`), with what stands around it in a layer.

On a GPU few rows stream the weight through registers, some more go through the matrix units with the weight decoded on
its way there, and where no kernel does that for as many the whole of it is widened first: the library's product then
outweighs that pass. Norm and gate are kernels of their own, but for few rows and for prompts, and the gate of plain
integers. Shapes that kernels do not take, and a
CPU, multiply by the widened weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.kernels.dispatch import INTERPRETED, on_cuda, on_triton
from quire.kernels.elementwise.activation import silu_and_mul
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm import codes, decode_gemm, fp8_blocks
from quire.kernels.gemm.codes import BLOCK, NIBBLES, Codes
from quire.kernels.gemm.decode_gemm import has_gluon
from quire.kernels.gemm.linear import linear as plain_linear

if TYPE_CHECKING:
    from quire.kernels.gemm.triton.plan import Plan

RING_ROWS = {"int8": 8, "e4m3": 1}  # as measured on an H200
FEW_ROWS, SOME_ROWS = 16, 512


def linear(
    x: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `quire.kernels.gemm.linear`."""
    if fp8_blocks.takes(x, weight):
        return fp8_blocks.linear(
            x, weight, bias, norm=norm, gated=gated, residual=residual, out_dtype=out_dtype, out=out
        )
    how = _ring(x, weight, gated=gated, residual=decode_gemm.adds_up(norm, residual, out))
    if how is not None:
        scale = weight.scale if weight.scale.shape[1] > 1 else weight.scale[:, 0]
        return decode_gemm.linear(x, weight.codes, bias, norm, gated, residual, out_dtype, out, how, scale)
    on_gpu = on_cuda(x) and len(x) and x.dtype in (torch.bfloat16, torch.float16)
    result = (out_dtype or x.dtype) if out is None else out.dtype
    alike = {x.dtype, result, x.dtype if residual is None else residual.dtype} == {x.dtype}
    wide = result == torch.float32 and residual is None and not gated  # as logits are
    is_taken, in_words = on_gpu and _is_taken(weight), on_gpu and _has_words(weight)
    where = out if residual is None else residual
    tiled = (is_taken or in_words) and (alike or wide) and _in_own_tiles(x, weight, gated, where, wide=wide)
    few = in_words and not tiled and len(x) <= FEW_ROWS and _in_registers(x, weight)
    if not (tiled or few or (is_taken and len(x) <= SOME_ROWS)):
        return plain_linear(
            x, widened(weight, x.dtype), bias,
            norm=norm, gated=gated, residual=residual, out_dtype=out_dtype, out=out,
        )  # fmt: skip
    if norm is not None and not (few and len(x) == 1):
        x, norm = rms_norm(x, *norm), None
    n, adds = len(weight.codes) // (2 if gated and (few or tiled) else 1), residual is not None
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((len(x), n), dtype=x.dtype if gated else out_dtype or x.dtype, device=x.device)
    if few:
        return _few_rows(x, weight, bias, norm, gated, adds, out)
    if tiled:
        return _own_tiles(x, weight, bias, gated, adds, out)
    y = _product(x, weight, bias, adds, out)
    return silu_and_mul(y) if gated else y


def _ring(x: torch.Tensor, weight: Codes, *, gated: bool, residual: bool) -> Plan | None:
    """How few rows are multiplied by bytes that come through a ring in shared memory, if they are. residual: see
    `decode_gemm.adds_up`."""
    alike = weight.group == BLOCK or weight.group >= weight.columns
    plain = weight.zero is weight.outer is None and weight.scale.dtype != torch.uint8
    if not (on_cuda(x) and 0 < len(x) <= RING_ROWS.get(weight.kind, 0) and x.stride(1) == 1 and alike and plain):
        return None
    from quire.kernels.gemm.triton.plan import Ring

    how = decode_gemm.plan_8_bits(x, weight.codes, gated=gated, residual=residual)
    if not isinstance(how, Ring):
        return None
    # Of floats, one program a processor waits longer for its scales than the other kernel takes.
    return how if weight.kind == "int8" or how.programs == 2 else None


def _in_registers(x: torch.Tensor, weight: Codes) -> bool:
    """Whether few rows are multiplied by a kernel in Gluon."""
    whole = weight.zero is None or weight.group >= 32  # a word's columns have one zero
    return weight.kind in NIBBLES and whole and x.stride(0) % 8 == 0 and has_gluon(x.device)


def _few_rows(
    x: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    adds: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    from quire.kernels.gemm.triton import code_ring_sm90, code_rows
    from quire.kernels.triton.launch import has_gluon_sm90

    in_bytes = has_gluon_sm90(x.device) and code_ring_sm90.takes(x, weight, gated, adds)
    product = code_ring_sm90.linear if in_bytes else code_rows.linear
    y: torch.Tensor = product(x, weight, bias, norm, gated, adds, out)
    return y


def _product(x: torch.Tensor, weight: Codes, bias: torch.Tensor | None, adds: bool, out: torch.Tensor) -> torch.Tensor:
    from quire.kernels.gemm.triton import grouped_rows, grouped_tiles

    if len(x) <= FEW_ROWS:
        return grouped_rows.linear(x, weight, bias, adds, out)
    return grouped_tiles.linear(x, weight, bias, adds, out)


def _in_own_tiles(x: torch.Tensor, weight: Codes, gated: bool, out: torch.Tensor | None, *, wide: bool) -> bool:
    """Whether the kernel for compute capability 9.0 that has the gate in it multiplies these. wide: to float32."""
    from quire.kernels.triton.launch import has_gluon_sm90

    if INTERPRETED or not has_gluon_sm90(x.device):
        return False
    from quire.kernels.gemm.triton import code_gemm_sm90

    taken: bool = code_gemm_sm90.takes(x, weight, gated, out, wide=wide)
    return taken


def _own_tiles(
    x: torch.Tensor, weight: Codes, bias: torch.Tensor | None, gated: bool, adds: bool, out: torch.Tensor
) -> torch.Tensor:
    from quire.kernels.gemm.triton import code_gemm_sm90

    y: torch.Tensor = code_gemm_sm90.linear(x, weight, bias, gated, adds, out)
    return y


def _is_taken(weight: Codes) -> bool:
    from quire.kernels.gemm.triton.codes import is_taken

    return is_taken(weight)


def _has_words(weight: Codes) -> bool:
    from quire.kernels.gemm.triton.codes import has_words

    return has_words(weight)


def widened(weight: Codes, dtype: torch.dtype, wanted: torch.Tensor | None = None) -> torch.Tensor:
    """What the codes stand for, by the kernel where there is one. wanted: int32, of each of so many equal shares of the
    rows: not 0 for those that are needed."""
    if on_triton(weight.codes):
        from quire.kernels.gemm.triton import grouped_widen

        return grouped_widen.widened(weight, dtype, wanted)
    return codes.widened(weight, dtype)
