"""Choices of experts and their order: Triton's kernels against plain torch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.dispatch import INTERPRETED, on_triton
from quire.kernels.moe.routing import Live, Routes, Rule, route, route_reference
from quire.kernels.moe.tiling import Tiling, most_tiles, tile_reference
from tests.kernels.compare import NARROW

RULES = {
    "softmax": Rule(128, 8, renormalize=True),
    "all": Rule(8, 8),
    "one": Rule(60, 1),
    "odd": Rule(37, 6, scale=2.5),
    "sigmoid": Rule(64, 6, "sigmoid", renormalize=True, scale=1.5),
    "groups": Rule(64, 6, "sigmoid", renormalize=True, groups=8, top_groups=3, group_best=2),
    "odd groups": Rule(30, 4, "softmax", groups=5, top_groups=2),
    "many": Rule(512, 10, renormalize=True),
    "mixer": Rule(16, 2, "sparse_mixer"),
}


def check_tiling(tiling: Tiling, experts: torch.Tensor, num_experts: int) -> None:
    """Each choice of a living token is in one tile, of its expert; tiles are as few as can be."""
    order, tiles, flat = tiling.order.tolist(), tiling.tiles.tolist(), experts.flatten().tolist()
    assert len(tiles[0]) == most_tiles(len(flat), num_experts, tiling.rows)
    seen: list[int] = []
    for expert, begin, count in zip(*tiles, strict=True):
        if expert >= 0:
            assert 0 < count <= tiling.rows
            assert all(flat[choice] == expert for choice in order[begin : begin + count])
            seen += order[begin : begin + count]
    assert sorted(seen) == [place for place, expert in enumerate(flat) if expert >= 0]
    counts = [flat.count(expert) for expert in range(num_experts)]
    assert sum(expert >= 0 for expert in tiles[0]) == sum(-(-count // tiling.rows) for count in counts)


def near(ours: Routes, theirs: Routes) -> None:
    """The same experts with the same weights; places may differ, and near ties."""
    by = [torch.zeros(len(theirs.experts), 1 + int(theirs.experts.max()) + 1) for _ in "ab"]
    for table, routes in zip(by, (ours, theirs), strict=True):
        assert (routes.experts < table.shape[1] - 1).all()
        table.scatter_(1, routes.experts.long().cpu() % table.shape[1], routes.weights.cpu())
    assert (by[0] - by[1]).abs().max() <= 1e-6


def run(logits: torch.Tensor, rule: Rule, bias: torch.Tensor | None, live: Live | None, rows: int | None) -> Routes:
    if logits.is_cuda or INTERPRETED:
        from quire.kernels.moe.triton import routing

        if rule.scoring == "sparse_mixer":
            return routing.sort(route(logits, rule, bias, live), rule.experts)
        return routing.route(logits, rule, bias, live, None, rows)
    routes = route(logits, rule, bias, live)
    return routes._replace(tiling=tile_reference(routes.experts, rule.experts, rows or 16))


@pytest.mark.parametrize("tokens", [1, 3, 64, 65, 200])
@pytest.mark.parametrize("name", RULES)
def test_choices_weights_and_order(name: str, tokens: int, device: torch.device) -> None:
    rule = RULES[name]
    logits = torch.randn(tokens, rule.experts, device=device) * 2
    bias = torch.randn(rule.experts, device=device) * 0.2 if rule.scoring == "sigmoid" else None
    slots = torch.randint(0, 40, (tokens,), dtype=torch.int32, device=device)
    slots[0] = 16
    for live in (None, Live(slots, 16)):
        routes = run(logits, rule, bias, live, 16)
        near(routes, route_reference(logits, rule, bias, live))
        if routes.tiling is not None:
            check_tiling(routes.tiling, routes.experts, rule.experts)


@pytest.mark.parametrize("tokens", [5, 100])
def test_nobody(tokens: int, device: torch.device) -> None:
    """All padding: no tile, no weight."""
    rule = RULES["softmax"]
    live = Live(torch.full((tokens,), -1, dtype=torch.int32, device=device), 16)
    routes = run(torch.randn(tokens, rule.experts, device=device), rule, None, live, 16)
    assert (routes.experts == -1).all()
    assert (routes.weights == 0).all()
    assert routes.tiling is not None
    assert (routes.tiling.tiles[0] == -1).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_still_chooses_experts(value: float, device: torch.device) -> None:
    """Kernels index with the choices: each an expert, none twice."""
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("of kernels alone")
    for rule in (RULES["softmax"], RULES["groups"]):
        logits = torch.randn(6, rule.experts, device=device)
        logits[0], logits[2, 5], logits[3, ::2] = value, value, value
        routes = run(logits, rule, None, None, 16)
        assert routes.experts.min() >= 0
        assert routes.experts.max() < rule.experts
        assert all(len(set(row)) == rule.top_k for row in routes.experts.tolist())
        assert routes.tiling is not None
        check_tiling(routes.tiling, routes.experts, rule.experts)


def test_a_thousand_tokens(device: torch.device) -> None:
    """In the interpreter it is the order alone that is ours, for which so many take another kernel."""
    rule, tokens = (RULES["mixer"], 1040) if INTERPRETED else (RULES["softmax"], 1024)
    logits = torch.randn(tokens, rule.experts, device=device)
    logits[:, 3] += 4  # wanted by most
    logits[:, 9] -= 40  # by nobody
    routes = run(logits, rule, None, None, 64)
    near(routes, route_reference(logits, rule))
    assert routes.tiling is not None
    check_tiling(routes.tiling, routes.experts, rule.experts)


@pytest.mark.parametrize("name", ["one", "odd", "sigmoid", "groups", "many"])
@pytest.mark.parametrize("tokens", [1024, 1023, 2100])
def test_tokens_that_are_counted_as_they_choose(name: str, tokens: int, device: torch.device) -> None:
    """And those that are not, for they are too few, or have too many experts; some are padding."""
    if INTERPRETED and tokens != 1024:
        pytest.skip("takes long")
    rule = RULES[name]
    logits = torch.randn(tokens, rule.experts, device=device)
    live = Live(torch.randint(0, 40, (tokens,), dtype=torch.int32, device=device), 16)
    bias = torch.randn(rule.experts, device=device) * 0.2 if rule.scoring == "sigmoid" else None
    routes = run(logits, rule, bias, live, 128)
    near(routes, route_reference(logits, rule, bias, live))
    assert routes.tiling is not None
    check_tiling(routes.tiling, routes.experts, rule.experts)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (70, 32), (200, 128)])
def test_rows_in_the_order_of_their_choices(tokens: int, rows: int, device: torch.device) -> None:
    """Of living tokens; what stands behind the last is anything."""
    if not on_triton(torch.empty(0, device=device)):
        pytest.skip("Triton runs on a GPU or in its interpreter")
    from quire.kernels.moe.triton.in_order import in_order

    x = torch.randn(tokens, 1100, device=device).to(NARROW)[:, :1096]
    experts = torch.randint(-1, 9, (tokens, 3), dtype=torch.int32, device=device)
    tiling, there = tile_reference(experts, 9, rows), int((experts >= 0).sum())
    tokens_of = tiling.order[:there].long() // 3
    assert torch.equal(in_order(x, tiling, 3)[:there], x[tokens_of])
