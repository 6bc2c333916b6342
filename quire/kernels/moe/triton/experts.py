"""Mixtures of experts on a GPU: the kernels that a plan names, one after another."""

from __future__ import annotations

from functools import cache

import torch

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.moe.inside import USUAL, Inside
from quire.kernels.moe.routes import Routes
from quire.kernels.moe.triton import direct
from quire.kernels.moe.triton.grouped import GroupedInside, combine, compile_once, grouped
from quire.kernels.moe.triton.plan import Direct, of_rows, plan
from quire.kernels.triton.launch import has_gluon_sm90


@cache
def _has_copy_engine(device: torch.device) -> bool:
    return INTERPRETED or (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9)


def add_experts(
    x: torch.Tensor,
    routes: Routes,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    norm: tuple[torch.Tensor, float] | None = None,
    inside: Inside = USUAL,
) -> torch.Tensor:
    """See `quire.kernels.moe.experts`."""
    tokens, top_k = routes.experts.shape
    if not tokens:
        return residual
    if routes.tiling is None:
        one = plan(tokens, top_k, len(gate_up)).direct or Direct()  # of several ranks whole experts are few here
        return direct.add_experts(x, routes.experts, routes.weights, gate_up, down, residual, scales, norm, inside, one)
    how = of_rows(routes.tiling.rows, gate_up.itemsize)
    if norm is not None:
        x = rms_norm(x, *norm)
    inner_size = down.shape[2]
    bulk = _has_copy_engine(x.device) and all(
        size * width % 16 == 0 for size in (x.shape[1], inner_size) for width in (gate_up.itemsize, x.itemsize)
    )
    first, second = (None, None) if scales is None else scales
    inner = torch.empty((tokens * top_k, inner_size), dtype=x.dtype, device=x.device)
    opened = GroupedInside(inside.gate_up_bias, inside.gate)
    compile_once(x, gate_up, first, None, inner, routes.tiling, top_k, opened, bulk=bulk)
    grouped(x, gate_up, first, None, inner, routes.tiling, top_k, opened, how.gate_up, bulk=bulk)
    parts = torch.empty((tokens * top_k, x.shape[1]), dtype=x.dtype, device=x.device)
    if not INTERPRETED and second is None and has_gluon_sm90(x.device):
        from quire.kernels.moe.triton import grouped_sm90 as wide

        if wide.takes(inner, down):
            product = (inner, down, inside.down_bias, routes.weights, parts, routes.tiling)
            wide.compile_once(*product)
            if routes.tiling.rows == wide.ROWS:
                return combine(wide.down(*product), routes.experts, residual)
    closed = GroupedInside(inside.down_bias)
    compile_once(inner, down, second, routes.weights, parts, routes.tiling, top_k, closed, bulk=bulk)
    grouped(inner, down, second, routes.weights, parts, routes.tiling, top_k, closed, how.down, bulk=bulk)
    return combine(parts, routes.experts, residual)
