"""What adapters add to a mixture's experts, all at once, is what experts with merged weights make."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.low_rank.grouped import GroupedFactors, add_grouped
from quire.kernels.low_rank.rows import adapter_rows
from quire.kernels.moe.experts import add_each_with
from quire.kernels.moe.inside import Inside
from quire.kernels.moe.routes import Routes
from quire.layers.low_rank import ActiveRows, ExpertFactors, HostFactors, LowRankExperts

EXPERTS, HIDDEN, INNER, TOP = 6, 32, 24, 2


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.3


def factors(rows: int, columns: int, parts: int, rank: int, *, gains: bool) -> HostFactors:
    own = torch.rand(rows) + 0.5 if gains else None
    return HostFactors(drawn(parts * rank, columns), drawn(rank, rows), own)


def merged(weight: torch.Tensor, one: HostFactors | None, parts: int) -> torch.Tensor:
    if one is None:
        return weight
    added = [up @ down for up, down in zip(one.up.T.chunk(parts), one.down.chunk(parts), strict=True)]
    return (weight if one.gains is None else weight * one.gains[:, None]) + torch.cat(added)


def adapter(rank: int, experts: list[int], *, gains: bool) -> ExpertFactors:
    gate_up = {e: factors(2 * INNER, HIDDEN, 2, rank + e % 2, gains=gains and e % 2 == 0) for e in experts}
    down = {e: factors(HIDDEN, INNER, 1, rank, gains=gains) for e in experts[:-1]}
    return ExpertFactors(gate_up, down)


@pytest.mark.parametrize("tokens", [1, 7, 60])
@pytest.mark.parametrize("gains", [False, True])
def test_several_adapters_and_none(tokens: int, gains: bool) -> None:
    """Of different ranks, for some experts each; tokens that are nobody's go to none."""
    torch.manual_seed(tokens)
    gate_up, down = drawn(EXPERTS, 2 * INNER, HIDDEN), drawn(EXPERTS, HIDDEN, INNER)
    adapters = {1: adapter(2, [0, 1, 2, 4], gains=gains), 2: adapter(5, [5, 1], gains=False)}
    active = ActiveRows(3)
    low_rank = LowRankExperts(EXPERTS, torch.device("cpu"), active)
    low_rank.put(1, adapter(7, [3], gains=False))  # that makes room
    for slot, one in adapters.items():
        low_rank.put(slot, one)
    slots = torch.randint(0, 3, (tokens,), dtype=torch.int32)
    active.rows = adapter_rows(slots, 3)
    chosen = torch.rand(tokens, EXPERTS).topk(TOP).indices.int()
    chosen[tokens // 2 :: 9] = -1
    weights, x, residual = torch.rand(tokens, TOP), drawn(tokens, HIDDEN), drawn(tokens, HIDDEN)
    wanted = residual.clone()
    for token, slot in enumerate(slots.tolist()):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            if expert < 0:
                continue
            own = adapters.get(slot, ExpertFactors({}, {}))
            gate, up = (x[token] @ merged(gate_up[expert], own.gate_up.get(expert), 2).T).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            wanted[token] += weight * (inner @ merged(down[expert], own.down.get(expert), 1).T)
    found = add_each_with(
        x, Routes(chosen, weights, None), lambda e: gate_up[e], lambda e: down[e], residual, Inside(),
        (low_rank.add_gate_up, low_rank.add_down),
    )  # fmt: skip
    assert (found - wanted).abs().max() <= 1e-4
    stacked = [one for pair in low_rank._slots.values() for one in pair if one is not None]
    assert low_rank.num_bytes() == sum(4 * t.numel() for _, one in stacked for t in one[:3] if t is not None)


def test_groups_of_very_different_sizes() -> None:
    """Taken in shares, so that padding stays small; rows of no group stay as they are."""
    groups = torch.tensor([0] * 50 + [3, -1, 2, 2, -1, 1])[torch.randperm(56)]
    down, up, gains = drawn(4, 2 * 3, 16), drawn(4, 10, 3), torch.rand(4, 10)
    x, y = drawn(56, 16), drawn(56, 10)
    wanted = y.clone()
    for row, group in enumerate(groups.tolist()):
        if group >= 0:
            inner = (down[group] @ x[row]).chunk(2)
            parts = [own @ part for own, part in zip(up[group].chunk(2), inner, strict=True)]
            wanted[row] = y[row] * gains[group] + torch.cat(parts)
    assert (add_grouped(y, x, groups, GroupedFactors(down, up, gains, 2)) - wanted).abs().max() <= 1e-5
