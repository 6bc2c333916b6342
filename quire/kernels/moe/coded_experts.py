"""Experts in codes (`kernels/gemm/codes.py`), multiplied as they are: see `kernels/moe/experts.py`. A step of many
tokens an expert, and what there is no kernel for, is left to the experts widened."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import INTERPRETED, on_cuda
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm.codes import BLOCK, Codes
from quire.kernels.gemm.decode_gemm import has_gluon
from quire.kernels.moe.inside import Inside
from quire.kernels.moe.routes import Routes
from quire.kernels.summands import Summands


def takes(x: torch.Tensor, routes: Routes, gate_up: Codes, down: Codes) -> bool:
    """Whether `add_experts` has kernels for these, and they take less time than to widen the experts."""
    if INTERPRETED or not on_cuda(x) or not len(x) or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if routes.tiling is None:
        return has_gluon(x.device) and _few_are_taken(x, gate_up, down)
    mean = routes.experts.numel() / len(gate_up.codes)
    return _has_tiles(x.device) and all(_in_tiles(of, x.dtype, mean) for of in (gate_up, down))


def _few_are_taken(x: torch.Tensor, gate_up: Codes, down: Codes) -> bool:
    from quire.kernels.moe.triton import code_direct

    return x.stride(1) == 1 and all(code_direct.takes(of) for of in (gate_up, down))


def _has_tiles(device: torch.device) -> bool:
    from quire.kernels.triton.launch import has_gluon_sm90

    return has_gluon_sm90(device)


def _in_tiles(of: Codes, dtype: torch.dtype, mean: float) -> bool:
    """mean: rows an expert."""
    from quire.kernels.gemm.triton.code_plan import most_rows
    from quire.kernels.moe.triton import code_tiles_sm90

    plain = of.kind == "int4" and of.group == BLOCK and of.zero is of.outer is None and dtype == torch.bfloat16
    most = most_rows(of.kind, of.group, plain=plain)
    return code_tiles_sm90.takes(of) and (most is None or mean <= most)


def add_experts(
    x: torch.Tensor,
    routes: Routes,
    gate_up: Codes,
    down: Codes,
    residual: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    inside: Inside,
) -> torch.Tensor:
    """See `quire.kernels.moe.experts`. gate_up: codes [experts, 2 · inner, …], scale [experts, 2 · inner, groups] and
    so on; down: of [experts, hidden, inner]."""
    experts, weights, tiling = routes
    if tiling is None:
        from quire.kernels.moe.triton import code_direct

        return code_direct.add_experts(x, experts, weights, gate_up, down, residual, norm, inside)
    from quire.kernels.moe.triton.grouped import combine

    parts = summands(x, routes, gate_up, down, norm, inside)
    return combine(parts.parts.flatten(0, 1), experts, residual)


def summands(
    x: torch.Tensor,
    routes: Routes,
    gate_up: Codes,
    down: Codes,
    norm: tuple[torch.Tensor, float] | None,
    inside: Inside,
) -> Summands:
    """The same before it is added up, of routes with a tiling."""
    from quire.kernels.moe.triton import code_tiles_sm90 as tiles
    from quire.kernels.moe.triton.in_order import in_order

    experts, weights, tiling = routes
    assert tiling is not None
    (tokens, top_k), hidden = experts.shape, x.shape[1]
    gate, first, second = inside
    x = in_order(x if norm is None else rms_norm(x, *norm), tiling, top_k)
    inner = torch.empty((tokens * top_k, down.columns), dtype=x.dtype, device=x.device)
    tiles.compile_once(x, gate_up, first, None, inner, tiling, gate)
    tiles.product(x, gate_up, first, None, inner, tiling, gate)
    parts = torch.empty((tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    tiles.compile_once(inner, down, second, weights, parts, tiling, None)
    tiles.product(inner, down, second, weights, parts, tiling, None)
    return Summands(parts.view(tokens, top_k, hidden), experts)
