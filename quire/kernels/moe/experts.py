"""What the chosen experts make of their tokens, added up: residual += Σ weight · down(silu(gate(x)) · up(x)); with
biases and other gates, if the experts have them.

On a GPU nothing is read back: shapes follow from the number of tokens alone, and kernels work through a table of tiles
that the device wrote. On a CPU the experts that are hit come one after another, each with all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.dispatch import on_cpu, on_cuda, on_triton
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm import cpu_linear
from quire.kernels.gemm.fp8_linear import Fp8Rows
from quire.kernels.moe.gate import sigmoid_gate
from quire.kernels.moe.inside import USUAL, Gate, Inside, Shared, gated
from quire.kernels.moe.routes import Routes, Rule

Dense = Callable[[int], torch.Tensor]
"""The matrix of an expert, in the dtype of activations."""
More = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(each row's expert, its token, y, x): add to y, the product of x, in place, and return it."""


def add_experts(
    x: torch.Tensor,
    routes: Routes,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    inside: Inside = USUAL,
    narrow: Fp8Rows | None = None,
    shared: Shared | None = None,
) -> torch.Tensor:
    """`residual += routed experts of x`, in place; returns it. Without a residual, what the experts make alone.

    x: what goes to the experts. gate_up: of each expert [gate | up]. scales: of each line of gate_up and down, float32,
    if these are of 8 bits. norm: weight [hidden] and eps of an RMS norm that x, which may be the residual, goes through
    first. inside: the experts' gate and biases. narrow: x, behind its norm, in 8 bits as well, if that is at hand; who
    multiplies by weights of 8 bits tile by tile has both sides so. shared: what all tokens go through besides; only for
    so few that `norms_inside`.

    Shapes:
        x, residual [tokens, hidden]; gate_up [experts, 2 · inner, hidden]; down [experts, hidden, inner];
        scales [experts, 2 · inner] and [experts, hidden].
    """
    if on_triton(x):
        from quire.kernels.moe.triton import experts

        return experts.add_experts(x, routes, gate_up, down, residual, scales, norm, inside, narrow, shared)
    if norm is not None:
        x = rms_norm(x, *norm)
    if shared is not None:
        residual = _add_shared(x, shared, torch.zeros_like(x) if residual is None else residual)

    def dense(weights: torch.Tensor, number: int) -> Dense:
        scale = None if scales is None else scales[number]
        return lambda e: weights[e] if scale is None else weights[e].float().mul_(scale[e, :, None]).to(x.dtype)

    return add_each(x, routes, dense(gate_up, 0), dense(down, 1), residual, inside)


def _add_shared(x: torch.Tensor, shared: Shared, residual: torch.Tensor) -> torch.Tensor:
    gate_up, down = shared.gate_up, shared.down
    if shared.scales is not None:
        first, second = shared.scales
        gate_up, down = (gate_up.float() * first[:, None]).to(x.dtype), (down.float() * second[:, None]).to(x.dtype)
    inner = gated(torch.nn.functional.linear(x, gate_up), Gate())
    if shared.gate is not None:
        inner = sigmoid_gate(inner, x, shared.gate)
    return residual.add_(torch.nn.functional.linear(inner, down))


def norms_inside(x: torch.Tensor, rule: Rule) -> bool:
    """Whether `add_experts` norms x [tokens, hidden] on its way, for less than it costs to do so before."""
    rows = x.shape[0]
    if not rows or not on_cuda(x):
        return False
    from quire.kernels.moe.triton.plan import plan

    return plan(rows, rule.top_k, rule.experts).direct


def takes_shared(x: torch.Tensor, rule: Rule) -> bool:
    """Whether `add_experts` takes shared experts along, for less than they cost by themselves: those of one token. Of
    more each would read their weights anew."""
    return x.shape[0] == 1 and norms_inside(x, rule)


def add_each(
    x: torch.Tensor,
    routes: Routes,
    gate_up: Dense,
    down: Dense,
    residual: torch.Tensor | None,
    inside: Inside = USUAL,
) -> torch.Tensor:
    """The same, expert by expert; waits for the device to know which. The sums are made in float32."""
    (experts, weights, _), top_k = routes, routes.experts.shape[1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    hit, counts = flat[order].unique_consecutive(return_counts=True)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, places in zip(hit.tolist(), order.split(counts.tolist()), strict=True):
        if expert < 0:
            continue
        tokens = places // top_k
        own = x[tokens]
        y = _product(own, gate_up(expert), inside.gate_up_bias, expert)
        inner = gated(y, inside.gate)
        y = _product(inner, down(expert), inside.down_bias, expert)
        y = y.float()
        total.index_add_(0, tokens, y.mul_(weights.flatten()[places, None]))
    return total.to(x.dtype) if residual is None else residual.add_(total)


def add_each_with(
    x: torch.Tensor,
    routes: Routes,
    gate_up: Dense,
    down: Dense,
    residual: torch.Tensor | None,
    inside: Inside,
    more: tuple[More, More],
) -> torch.Tensor:
    """The same, where something is added to the products with gate and up, and with down: to those of all experts at
    once, which takes memory for all of them."""
    (experts, weights, _), top_k = routes, routes.experts.shape[1]
    flat = experts.flatten()
    places = flat.argsort(stable=True)
    places = places[int((flat < 0).sum()) :]
    chosen, tokens = flat[places], places // top_k
    hit, counts = (found.tolist() for found in chosen.unique_consecutive(return_counts=True))

    def product(rows: torch.Tensor, weight: Dense, biases: torch.Tensor | None) -> torch.Tensor:
        parts = zip(hit, rows.split(counts), strict=True)
        return torch.cat([_product(own, weight(expert), biases, expert) for expert, own in parts])

    residual = torch.zeros_like(x) if residual is None else residual
    if not hit:
        return residual
    own = x[tokens]
    inner = gated(more[0](chosen, tokens, product(own, gate_up, inside.gate_up_bias), own), inside.gate)
    y = more[1](chosen, tokens, product(inner, down, inside.down_bias), inner).float()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return residual.add_(total.index_add_(0, tokens, y.mul_(weights.flatten()[places, None])))


def _product(x: torch.Tensor, weight: torch.Tensor, biases: torch.Tensor | None, expert: int) -> torch.Tensor:
    bias = None if biases is None else biases[expert]
    return cpu_linear.linear(x, weight, bias) if on_cpu(x) else torch.nn.functional.linear(x, weight, bias)
