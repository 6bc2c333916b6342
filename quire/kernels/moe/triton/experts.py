"""Mixtures of experts on a GPU: the kernels that a plan names, one after another."""

from __future__ import annotations

from functools import cache

import torch

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm.fp8_linear import E4M3, Fp8Rows
from quire.kernels.gemm.triton import fp8_rows
from quire.kernels.moe.inside import USUAL, Inside, Shared
from quire.kernels.moe.routes import Routes
from quire.kernels.moe.tiling import Tiling
from quire.kernels.moe.triton import direct
from quire.kernels.moe.triton.grouped import GroupedInside, combine, compile_once, grouped
from quire.kernels.moe.triton.plan import apart, of_rows
from quire.kernels.summands import Summands
from quire.kernels.triton.launch import cdiv, has_gluon_sm90


@cache
def _has_copy_engine(device: torch.device) -> bool:
    return INTERPRETED or (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9)


def add_experts(
    x: torch.Tensor,
    routes: Routes,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    norm: tuple[torch.Tensor, float] | None = None,
    inside: Inside = USUAL,
    narrow: Fp8Rows | None = None,
    shared: Shared | None = None,
) -> torch.Tensor:
    """See `quire.kernels.moe.experts`."""
    if not len(x):
        return x if residual is None else residual
    if routes.tiling is None:
        one = apart(x.shape[1], down.shape[2], routes.experts.shape[1], shared=shared is not None)
        return direct.add_experts(
            x, routes.experts, routes.weights, gate_up, down, residual, scales, norm, inside, shared, one
        )
    assert shared is None
    parts = summands(x, routes, gate_up, down, scales, norm, inside, narrow)
    return combine(parts.parts.flatten(0, 1), routes.experts, residual)


def summands(
    x: torch.Tensor,
    routes: Routes,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    norm: tuple[torch.Tensor, float] | None = None,
    inside: Inside = USUAL,
    narrow: Fp8Rows | None = None,
) -> Summands:
    """The same before it is added up, of routes with a tiling."""
    assert routes.tiling is not None
    if scales is not None and gate_up.dtype == E4M3 and x.dtype in (torch.bfloat16, torch.float16):
        if narrow is None:
            narrow = Fp8Rows(*(fp8_rows.quantize(x) if norm is None else fp8_rows.rms_norm_quantize(x, *norm)))
        parts = _narrow(narrow, x.dtype, routes, routes.tiling, gate_up, down, scales, inside)
    else:
        parts = _wide(x if norm is None else rms_norm(x, *norm), routes, routes.tiling, gate_up, down, scales, inside)
    return Summands(parts.view(*routes.experts.shape, -1), routes.experts)


def _wide(
    x: torch.Tensor,
    routes: Routes,
    tiling: Tiling,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    inside: Inside,
) -> torch.Tensor:
    """What each choice's expert makes of its token, times its weight, [choices, hidden]."""
    choices, (hidden, inner_size) = routes.experts.numel(), down.shape[1:]
    top_k, how = routes.experts.shape[1], of_rows(tiling.rows, max(gate_up.itemsize, x.itemsize))
    bulk = _has_copy_engine(x.device) and all(
        size * width % 16 == 0 for size in (hidden, inner_size) for width in (gate_up.itemsize, x.itemsize)
    )
    first, second = (None, None) if scales is None else scales
    inner = torch.empty((choices, inner_size), dtype=x.dtype, device=x.device)
    opened = GroupedInside(inside.gate_up_bias, inside.gate)
    compile_once(x, gate_up, first, None, inner, tiling, top_k, opened, bulk=bulk)
    grouped(x, gate_up, first, None, inner, tiling, top_k, opened, how.gate_up, bulk=bulk)
    parts = torch.empty((choices, hidden), dtype=x.dtype, device=x.device)
    if not INTERPRETED and second is None and has_gluon_sm90(x.device):
        from quire.kernels.moe.triton import grouped_sm90 as wide

        if wide.takes(inner, down):
            product = (inner, down, inside.down_bias, routes.weights, parts, tiling)
            wide.compile_once(*product)
            if tiling.rows == wide.ROWS:
                return wide.down(*product)
    closed = GroupedInside(inside.down_bias)
    compile_once(inner, down, second, routes.weights, parts, tiling, top_k, closed, bulk=bulk)
    return grouped(inner, down, second, routes.weights, parts, tiling, top_k, closed, how.down, bulk=bulk)


def _narrow(
    x: Fp8Rows,
    dtype: torch.dtype,
    routes: Routes,
    tiling: Tiling,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    inside: Inside,
) -> torch.Tensor:
    """The same where both sides of a product have 8 bits."""
    choices, (hidden, inner_size) = routes.experts.numel(), down.shape[1:]
    top_k, how = routes.experts.shape[1], of_rows(tiling.rows, gate_up.itemsize)
    bulk = _has_copy_engine(down.device) and hidden % 16 == inner_size % 16 == 0
    inner = Fp8Rows(
        torch.empty((choices, inner_size), dtype=down.dtype, device=down.device),
        torch.empty((choices, cdiv(inner_size, how.gate_up.block_n)), dtype=torch.float32, device=down.device),
    )
    opened = GroupedInside(inside.gate_up_bias, inside.gate, x.scale, inner.scale)
    first = (x.values, gate_up, scales[0], None, inner.values, tiling, top_k, opened)
    compile_once(*first, bulk=bulk)
    grouped(*first, how.gate_up, bulk=bulk)
    parts = torch.empty((choices, hidden), dtype=dtype, device=down.device)
    closed = GroupedInside(inside.down_bias, x_scale=inner.scale, unit=how.gate_up.block_n)
    second = (inner.values, down, scales[1], routes.weights, parts, tiling, top_k, closed)
    compile_once(*second, bulk=bulk)
    return grouped(*second, how.down, bulk=bulk)
