"""Products with chosen experts: Triton's kernels and plain torch against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from quire.distributed.topology import Topology
from quire.kernels.dispatch import INTERPRETED, on_triton
from quire.kernels.moe.experts import add_experts
from quire.kernels.moe.gate import sigmoid_gate
from quire.kernels.moe.inside import USUAL, Gate, Inside, Shared
from quire.kernels.moe.router import router_logits
from quire.kernels.moe.routing import Here, Live, Routes, Rule, route
from quire.layers.spread import Spread
from quire.quantization.fp8 import Fp8Channel
from tests.kernels.compare import NARROW, assert_near

HIDDEN, INNER = 192, 80


def exact(
    x: torch.Tensor,
    routes: Routes,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor,
    inside: Inside = USUAL,
) -> torch.Tensor:
    """In float64, token by token."""
    gating, first, second = inside
    first, second = (None if bias is None else bias.double().cpu() for bias in (first, second))
    y = residual.double().cpu()
    x, gate_up, down = x.double().cpu(), gate_up.double().cpu(), down.double().cpu()
    for token, (experts, weights) in enumerate(
        zip(routes.experts.tolist(), routes.weights.double().tolist(), strict=True)
    ):
        for expert, weight in zip(experts, weights, strict=True):
            if expert >= 0:
                if gating.squared:
                    middle = (gate_up[expert] @ x[token]).clamp(min=0).square()
                    y[token] += weight * (down[expert] @ middle)
                    continue
                gate, up = (gate_up[expert] @ x[token] + (0 if first is None else first[expert])).chunk(2)
                if gating.limit:
                    gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
                middle = gate * torch.sigmoid(gating.alpha * gate) * (up + gating.shift)
                y[token] += weight * (down[expert] @ middle + (0 if second is None else second[expert]))
    return y


def make(
    experts: int, tokens: int, device: torch.device, hidden: int = HIDDEN, inner: int = INNER, dtype: Any = NARROW
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, gate_up, down, residual."""
    gate_up = torch.randn(experts, 2 * inner, hidden, device=device) / hidden**0.5
    down = torch.randn(experts, hidden, inner, device=device) / inner**0.5
    x, residual = (torch.randn(tokens, hidden, device=device) for _ in "xr")
    return tuple(tensor.to(dtype) for tensor in (x, gate_up, down, residual))  # type: ignore[return-value]


def routes_of(
    experts: int, tokens: int, top_k: int, device: torch.device, dead: int = 0, here: Sequence[Here | None] = (None,)
) -> Any:
    """Some experts are nobody's, one is everybody's; the last `dead` tokens are padding. here: of each rank that
    chooses."""
    logits = torch.randn(tokens, experts, device=device)
    logits[:, 0] += 5
    logits[:, experts // 2] -= 50
    slots = torch.full((tokens,), 99, dtype=torch.int32, device=device)
    slots[tokens - dead :] = 0
    rule = Rule(experts, top_k, renormalize=True)
    made = [route(logits, rule, None, Live(slots, 16), one) for one in here]
    return made[0] if len(made) == 1 else made


def assert_near_8_bits(found: torch.Tensor, wanted: torch.Tensor, residual: torch.Tensor, routes: Routes) -> None:
    """Rows that were ordered are multiplied in 8 bits themselves, which is 2.6 % off for each of two products and the
    gate's other side; Triton's interpreter loses what it carries over when it rounds."""
    if routes.tiling is None:
        assert_near(found, wanted, NARROW)
    else:
        before = residual.double().cpu()
        error = (found.double().cpu() - wanted).norm() / (wanted - before).norm()
        assert error <= (0.15 if INTERPRETED else 0.06), f"relative error {error:.2e}"


@pytest.mark.parametrize("tokens", [1, 2, 3, 9, 70, 300])
@pytest.mark.parametrize(("experts", "top_k"), [(16, 4), (9, 3), (128, 8)])
def test_sums_of_experts(experts: int, top_k: int, tokens: int, device: torch.device) -> None:
    x, gate_up, down, residual = make(experts, tokens, device)
    routes = routes_of(experts, tokens, top_k, device)
    wanted = exact(x, routes, gate_up, down, residual)
    assert_near(add_experts(x, routes, gate_up, down, residual), wanted, NARROW)


@pytest.mark.parametrize("tokens", [1, 3, 20, 150])
@pytest.mark.parametrize("gate", [Gate(), Gate(alpha=1.702, limit=1.5, shift=1.0)], ids=str)
def test_biases_and_another_gate(gate: Gate, tokens: int, device: torch.device) -> None:
    """gpt-oss's gate, whose limit many numbers reach here."""
    x, gate_up, down, residual = make(16, tokens, device)
    first, second = (torch.randn(16, n, device=device).to(NARROW) for n in (2 * INNER, HIDDEN))
    routes = routes_of(16, tokens, 4, device, dead=tokens // 5)
    for inside in (Inside(gate, first, second), Inside(gate, first, None), Inside(gate)):
        wanted = exact(x, routes, gate_up, down, residual, inside)
        found = add_experts(x, routes, gate_up, down, residual.clone(), inside=inside)
        assert_near(found, wanted, NARROW)


@pytest.mark.parametrize("tokens", [1, 3, 20, 150])
def test_experts_without_a_gate(tokens: int, device: torch.device) -> None:
    x, gate_up, down, residual = make(16, tokens, device)
    up, inside = gate_up[:, :INNER].contiguous(), Inside(Gate(squared=True))
    routes = routes_of(16, tokens, 4, device, dead=tokens // 5)
    wanted = exact(x, routes, up, down, residual, inside)
    assert_near(add_experts(x, routes, up, down, residual, inside=inside), wanted, NARROW)


@pytest.mark.parametrize("tokens", [1, 40])
def test_biases_beside_weights_of_8_bits(tokens: int, device: torch.device) -> None:
    x, gate_up, down, residual = make(8, tokens, device, 128, 64)
    inside = Inside(Gate(limit=2.0), *(torch.randn(8, n, device=device).to(NARROW) for n in (128, 128)))
    packed = [[Fp8Channel().pack(matrix) for matrix in whole] for whole in (gate_up, down)]
    weights = [torch.stack([one["weight"] for one in each]) for each in packed]
    scales = [torch.stack([one["weight_scale"] for one in each]) for each in packed]
    dense = [weight.double() * scale[..., None].double() for weight, scale in zip(weights, scales, strict=True)]
    routes = routes_of(8, tokens, 2, device)
    wanted = exact(x, routes, *dense, residual, inside)
    found = add_experts(x, routes, *weights, residual.clone(), tuple(scales), inside=inside)
    assert_near_8_bits(found, wanted, residual, routes)


@pytest.mark.parametrize(("hidden", "inner"), [(64, 24), (96, 100), (40, 36)])
@pytest.mark.parametrize("tokens", [1, 12, 150])
def test_odd_sizes(tokens: int, hidden: int, inner: int, device: torch.device) -> None:
    """Lines that the copy engine can read, and lines that it cannot."""
    x, gate_up, down, residual = make(6, tokens, device, hidden, inner)
    routes = routes_of(6, tokens, 3, device)
    wanted = exact(x, routes, gate_up, down, residual)
    assert_near(add_experts(x, routes, gate_up, down, residual), wanted, NARROW)


@pytest.mark.parametrize("tokens", [4, 20, 100])
def test_padding_is_left_alone(tokens: int, device: torch.device) -> None:
    x, gate_up, down, residual = make(16, tokens, device)
    x[tokens // 2 :] = float("nan")
    before = residual.clone()
    routes = routes_of(16, tokens, 4, device, dead=tokens - tokens // 2)
    wanted = exact(x, routes, gate_up, down, residual)
    assert_near(add_experts(x, routes, gate_up, down, residual), wanted, NARROW)
    assert torch.equal(residual[tokens // 2 :], before[tokens // 2 :])


@pytest.mark.parametrize("tokens", [1, 6, 60, 300])
@pytest.mark.parametrize("placement", [[[0, 1, 2, 3, 4], [5, 6, 7, 8]], [[0, 3, 5, 7, 8], [0, 1, 2, 4, 6, 7]]])
def test_ranks_with_whole_experts_make_the_sum(placement: list[list[int]], tokens: int, device: torch.device) -> None:
    """Neighbours together, or two of them on both ranks; each computes what its own make, of live tokens alone."""
    x, gate_up, down, residual = make(9, tokens, device)
    twice = sum(map(len, placement)) - 9
    total, spreads = residual.clone(), [Spread(9, Topology(rank, 2, True), twice, device) for rank in range(2)]
    for spread in spreads:
        spread.place(placement)
    here = [None, *(spread.here for spread in spreads)]
    routes, *of_ranks = routes_of(9, tokens, 4, device, tokens // 3, here)
    wanted = exact(x, routes, gate_up, down, residual)
    for spread, mine in zip(spreads, of_ranks, strict=True):
        own = torch.tensor(spread.own, device=device)
        total = add_experts(x, mine, gate_up[own].contiguous(), down[own].contiguous(), total)
    assert_near(total, wanted, NARROW)
    loads = torch.bincount(routes.experts[routes.experts >= 0].flatten().cpu(), minlength=9)
    assert all(torch.equal(spread.loads.cpu(), loads.int()) for spread in spreads)


@pytest.mark.parametrize("tokens", [1, 10, 80, 400])
def test_weights_of_8_bits(tokens: int, device: torch.device) -> None:
    x, gate_up, down, residual = make(8, tokens, device, 128, 64)
    packed = [[Fp8Channel().pack(matrix) for matrix in whole] for whole in (gate_up, down)]
    weights = [torch.stack([one["weight"] for one in each]) for each in packed]
    scales = [torch.stack([one["weight_scale"] for one in each]) for each in packed]
    dense = [weight.double() * scale[..., None].double() for weight, scale in zip(weights, scales, strict=True)]
    routes = routes_of(8, tokens, 2, device)
    wanted = exact(x, routes, *dense, residual)
    found = add_experts(x, routes, *weights, residual.clone(), tuple(scales))
    assert_near_8_bits(found, wanted, residual, routes)


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 192), (160, 80), (72, 40)])
def test_products_of_8_bits_on_both_sides(hidden: int, inner: int, rows: int, device: torch.device) -> None:
    """What gate and up round is as near as 8 bits can be, and all else as near as sums are. Sizes that fill steps and
    units, those that do not, and those that the copy engine cannot read."""
    if not on_triton(torch.empty(0, device=device)):
        pytest.skip("Triton runs on a GPU or in its interpreter")
    from quire.kernels.gemm.triton import fp8_rows
    from quire.kernels.moe.triton import routing
    from quire.kernels.moe.triton.grouped import GroupedInside, grouped
    from quire.kernels.moe.triton.plan import of_rows

    experts, top_k, tokens = 5, 2, 70
    x, *matrices, _ = make(experts, tokens, device, hidden, inner)
    packed = [[Fp8Channel().pack(matrix) for matrix in whole] for whole in matrices]
    gate_up, down = (torch.stack([one["weight"] for one in each]) for each in packed)
    scales = [torch.stack([one["weight_scale"] for one in each]) for each in packed]
    routes = routing.route(torch.randn(tokens, experts, device=device), Rule(experts, top_k), None, None, None, rows)
    assert routes.tiling is not None
    how, bulk = of_rows(rows, 1), hidden % 16 == inner % 16 == 0
    values, scale = fp8_rows.quantize(x)
    unit, choices = how.gate_up.block_n, tokens * top_k
    middle = torch.zeros(choices, inner, device=device).to(gate_up.dtype)
    middle_scale = torch.zeros(choices, -(-inner // unit), device=device)
    first, second = GroupedInside(x_scale=scale, out_scale=middle_scale), GroupedInside(x_scale=middle_scale, unit=unit)
    grouped(values, gate_up, scales[0], None, middle, routes.tiling, top_k, first, how.gate_up, bulk=bulk)
    parts = torch.full((choices, hidden), torch.nan, device=device, dtype=NARROW)
    grouped(middle, down, scales[1], routes.weights, parts, routes.tiling, top_k, second, how.down, bulk=bulk)
    seen = values.double() * scale.double()[:, None]
    wide = middle.double() * middle_scale.double().repeat_interleave(unit, 1)[:, :inner]
    wanted, summed = torch.zeros_like(wide), torch.zeros(choices, hidden, dtype=torch.float64, device=device)
    for place, choice in enumerate(routes.tiling.order.tolist()):
        expert = int(routes.experts.flatten()[choice])
        dense = [w[expert].double() * s[expert].double()[:, None] for w, s in zip((gate_up, down), scales, strict=True)]
        gate, up = (dense[0] @ seen[choice // top_k]).chunk(2)
        wanted[place] = torch.nn.functional.silu(gate) * up
        summed[choice] = routes.weights.flatten()[choice] * (dense[1] @ wide[place])
    assert (wide - wanted).norm() / wanted.norm() <= (0.08 if INTERPRETED else 0.03)
    assert_near(parts, summed, NARROW)


def test_a_thousand_tokens(device: torch.device) -> None:
    if INTERPRETED:
        tokens, experts, hidden, inner = 264, 16, 64, 32
    else:
        tokens, experts, hidden, inner = 1024, 128, 128, 64
    x, gate_up, down, residual = make(experts, tokens, device, hidden, inner)
    routes = routes_of(experts, tokens, 8, device)
    wanted = exact(x, routes, gate_up, down, residual)
    assert_near(add_experts(x, routes, gate_up, down, residual), wanted, NARROW)


@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_a_norm_before(tokens: int, device: torch.device) -> None:
    """Of the residual itself, which is written to in the end."""
    _, gate_up, down, residual = make(16, tokens, device)
    routes, gain = routes_of(16, tokens, 4, device), torch.rand(HIDDEN, device=device).to(NARROW)
    normed = residual.double() * torch.rsqrt(residual.double().square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    wanted = exact(normed, routes, gate_up, down, residual)
    assert_near(add_experts(residual, routes, gate_up, down, residual, None, (gain, 1e-5)), wanted, NARROW)


def in_8_bits(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each its numbers and scales."""
    packed = [Fp8Channel().pack(matrix) for matrix in matrices]
    return torch.stack([one["weight"] for one in packed]), torch.stack([one["weight_scale"] for one in packed])


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("count", [1, 4])
def test_shared_experts_go_along(count: int, narrow: bool, opened: bool, tokens: int, device: torch.device) -> None:
    """Behind a norm, to the residual itself; and to nothing, of a token that is nobody's too."""
    hidden, inner = 192, 64
    _, gate_up, down, residual = make(64, tokens, device, hidden, inner)
    _, *parts, _ = make(count, 1, device, hidden, inner)
    first = parts[0].view(count, 2, inner, hidden).transpose(0, 1).reshape(-1, hidden)
    second = torch.cat([*parts[1]], 1)
    scales: Any = None
    shared_scales: Any = None
    whole = [matrix.double() for matrix in (gate_up, down, first, second)]
    if narrow:
        kept = [in_8_bits(matrix) for matrix in (gate_up, down, first[None], second[None])]
        whole = [(weight.double() * scale.double()[..., None]).view_as(weight) for weight, scale in kept]
        (gate_up, down), (first, second) = (weight for weight, _ in kept[:2]), (weight[0] for weight, _ in kept[2:])
        scales, shared_scales = [tuple(scale for _, scale in kept[i : i + 2]) for i in (0, 2)]
        shared_scales = tuple(scale[0] for scale in shared_scales)
    gain = (torch.rand(hidden, device=device) + 0.5).to(NARROW)
    opening = torch.randn(1, hidden, device=device).to(NARROW) / 8 if opened else None
    routes = routes_of(64, tokens, 4, device)

    normed = residual.double() * torch.rsqrt(residual.double().square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    gate, up = (normed @ whole[2].view(-1, hidden).T).chunk(2, dim=1)
    alone = torch.nn.functional.silu(gate) * up @ whole[3].view(hidden, -1).T
    if opening is not None:
        alone *= torch.sigmoid(normed @ opening.double().T)
    wanted = exact(normed, routes, whole[0], whole[1], residual) + alone.cpu()
    shared, usual = Shared(first, second, shared_scales, opening), (scales, (gain, 1e-5))
    found = add_experts(residual, routes, gate_up, down, residual.clone(), *usual, shared=shared)
    assert_near(found, wanted, NARROW)
    nobodys = routes._replace(experts=routes.experts.fill_(-1), weights=routes.weights.zero_())
    found = add_experts(residual, nobodys, gate_up, down, None, *usual, shared=shared)
    assert_near(found.double() + residual.double(), alone + residual.double(), NARROW)  # judged as the others are


def test_no_tokens(device: torch.device) -> None:
    x, gate_up, down, residual = make(8, 0, device)
    routes = routes_of(8, 0, 2, device)
    assert add_experts(x, routes, gate_up, down, residual).shape == (0, HIDDEN)


@pytest.mark.parametrize("tokens", [1, 5, 16, 30, 64, 120, 300])
@pytest.mark.parametrize("experts", [128, 60])
def test_logits_of_a_router(tokens: int, experts: int, device: torch.device) -> None:
    """In float32, whatever x is of."""
    if INTERPRETED:
        pytest.skip("of a GPU alone: elsewhere it is a product as any other")
    x, weight = (torch.randn(n, 2048, device=device).bfloat16() for n in (tokens, experts))
    weight, gain = weight / 45, torch.rand(2048, device=device).bfloat16()
    assert_near(router_logits(x, weight), x.double() @ weight.double().T, torch.bfloat16)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * gain.double()
    assert_near(router_logits(x, weight, (gain, 1e-6)), normed @ weight.double().T, torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 37])
def test_a_gate_a_token(tokens: int, device: torch.device) -> None:
    y, x = torch.randn(tokens, 90, device=device).to(NARROW), torch.randn(tokens, 1100, device=device).to(NARROW)
    weight = torch.randn(1, 1100, device=device).to(NARROW) / 30
    wanted = y.double() * torch.sigmoid(x.double() @ weight[0].double())[:, None]
    assert_near(sigmoid_gate(y, x, weight), wanted, NARROW)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 32, 64, 256, 1024, 3000])
@pytest.mark.parametrize(("experts", "top_k", "hidden", "inner"), [(128, 8, 2048, 768), (64, 8, 2048, 1024)])
def test_real_sizes(experts: int, top_k: int, hidden: int, inner: int, tokens: int) -> None:
    """And twice the same, in a graph: nothing is read back, and sums do not depend on who came first."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    x, gate_up, down, residual = make(experts, tokens, device, hidden, inner)
    logits, rule = torch.randn(tokens, experts, device=device), Rule(experts, top_k, renormalize=True)
    again = residual.clone()
    graph = torch.cuda.CUDAGraph()
    add_experts(x, route(logits, rule), gate_up, down, residual)
    with torch.cuda.graph(graph):
        add_experts(x, route(logits, rule), gate_up, down, again)
    saved = again.clone()
    for _ in range(3):
        again.copy_(saved)
        graph.replay()
        assert torch.equal(again, residual)
    routes = route(logits, rule)
    few = torch.arange(0, tokens, max(tokens // 16, 1), device=device)
    some = Routes(routes.experts[few], routes.weights[few])
    wanted = exact(x[few], some, gate_up, down, saved[few])
    assert_near(residual[few], wanted, NARROW)
