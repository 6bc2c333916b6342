"""Layers that keep a state, kernel by kernel: each row alone, token by token, is what a mixed step must make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.elementwise.gated_norm import gate_only, gated_norm
from quire.kernels.recurrent.channel_delta import channel_delta
from quire.kernels.recurrent.conv import causal_conv
from quire.kernels.recurrent.delta import DeltaWeights, gated_delta
from quire.kernels.recurrent.rows import CHUNK, Rows, make_rows
from quire.kernels.recurrent.selective import SelectiveWeights, selective_scan
from quire.kernels.recurrent.ssd import SSDWeights, ssd
from quire.platforms.transfers import upload
from tests.kernels.compare import assert_near

PAGES, ENTRY = 12, 1
NARROW = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies no bfloat16
PRECISIONS = [(torch.float32, 1e-4), (NARROW, 6e-2)]
POISON = 1e4  # what lies in pages whose requests begin


class Row(NamedTuple):
    """A row of a step: its seat (0: padding), tokens before it, and its own."""

    seat: int
    before: int
    tokens: int


DECODES = [Row(0, 0, 1), Row(3, 9, 1), Row(1, 0, 1), Row(5, 200, 1)]
PROMPTS = [Row(2, 0, 5), Row(4, 7, CHUNK), Row(6, 3, 1), Row(0, 0, 0), Row(7, 0, 2 * CHUNK + 3)]
STEPS = {
    "decodes": (DECODES, []),
    "both": (DECODES, PROMPTS),
    "prompts": ([], [Row(1, 0, CHUNK + 1), Row(2, 4, 3)]),
}
if INTERPRETED:
    STEPS = {"both": (DECODES[:2], [Row(2, 0, 5), Row(0, 0, 0), Row(4, 7, CHUNK + 3)])}


class Step(NamedTuple):
    listed: list[Row]
    rows: Rows
    table: list[list[int]]  # by seat
    num_tokens: int  # padding included
    device: torch.device

    def starts(self) -> list[int]:
        return [sum(row.tokens for row in self.listed[:i]) for i in range(len(self.listed))]


@pytest.fixture(params=list(STEPS))
def step(request: pytest.FixtureRequest, device: torch.device) -> Step:
    decodes, prompts = STEPS[request.param]
    listed = decodes + prompts
    ends = [sum(row.tokens for row in listed[: i + 1]) for i in range(len(listed))]
    num_tokens = ends[-1] + (7 if prompts else 0)
    table = [[0, 0], *([8 + seat % 3, seat] for seat in range(1, 8))]

    def ints(values: list[int]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.int32), device)

    rows = make_rows(
        num_tokens,
        len(decodes),
        max((row.tokens for row in prompts), default=0),
        ints([row.seat for row in listed]),
        ints([0, *ends]),
        ints([row.before + row.tokens for row in listed]),
        upload(torch.tensor(table, dtype=torch.int32), device),
    )
    return Step(listed, rows, table, num_tokens, device)


def random(device: torch.device, *shape: int) -> torch.Tensor:
    return upload(torch.randn(shape), device)


def check(
    step: Step,
    state: torch.Tensor,
    run: Callable[[torch.Tensor], torch.Tensor],
    alone: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
    tolerance: float = 1e-4,
) -> None:
    """run: the step over a state. alone: (one row's state, its token's number) → (state, output), one token."""
    state = state.clone()
    for row in step.listed:
        if row.seat and not row.before:
            state[step.table[row.seat][ENTRY]] = POISON
    expected, outputs = state.double(), {}
    for row, start in zip(step.listed, step.starts(), strict=True):
        page = step.table[row.seat][ENTRY]
        now = expected[page] if row.before and row.seat else torch.zeros_like(expected[page])
        for token in range(start, start + row.tokens):
            now, outputs[token] = alone(now, token)
        if row.seat and row.tokens:
            expected[page] = now
    ours = run(state)
    assert ours.shape[0] == step.num_tokens
    assert torch.isfinite(ours).all(), "what is nobody's stays finite"
    for token, output in outputs.items():
        torch.testing.assert_close(ours[token].double(), output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("taps", "bias", "silu"), [(4, True, True), (2, False, False)][: 1 if INTERPRETED else 2])
def test_convolution(step: Step, taps: int, bias: bool, silu: bool) -> None:
    channels = 70
    whole = random(step.device, step.num_tokens, channels + 5)
    x, weight = whole[:, 5:], random(step.device, channels, taps)
    told = random(step.device, channels) if bias else None

    def alone(state: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.cat([state, x[token].double()[None]])
        y = (seen.T * weight.double()).sum(1) + (0 if told is None else told.double())
        return seen[1:], torch.nn.functional.silu(y) if silu else y

    state = random(step.device, PAGES, taps - 1, channels)
    check(step, state, lambda s: causal_conv(x, weight, told, s, step.rows, ENTRY, silu=silu), alone)


@pytest.mark.parametrize(("heads", "groups", "dim", "size"), [(4, 2, 16, 8), (3, 1, 20, 32)][INTERPRETED:])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_ssd(step: Step, heads: int, groups: int, dim: int, size: int, dtype: torch.dtype, tolerance: float) -> None:
    tokens, each = step.num_tokens, heads // groups
    inner = random(step.device, tokens, heads * dim + 2 * groups * size).to(dtype)
    x, b, c = inner.split([heads * dim, groups * size, groups * size], 1)
    x, b, c = x.unflatten(1, (heads, dim)), b.unflatten(1, (groups, size)), c.unflatten(1, (groups, size))
    dt = random(step.device, tokens, heads).to(dtype)
    a, d, bias = (random(step.device, heads) for _ in range(3))
    weights = SSDWeights(a, d, bias, (0.05, 3.0))

    def alone(state: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        step_ = torch.nn.functional.softplus(dt[token].double() + bias.double()).clamp(0.05, 3.0)
        wide_b, wide_c = (part[token].double().repeat_interleave(each, 0) for part in (b, c))
        now = x[token].double()
        state = state * torch.exp(step_ * -torch.exp(a.double()))[:, None, None]
        state = state + (step_[:, None] * now)[..., None] * wide_b[:, None]
        return state, (state * wide_c[:, None]).sum(-1) + d.double()[:, None] * now

    state = random(step.device, PAGES, heads, dim, size)
    check(step, state, lambda s: ssd(x, b, c, dt, weights, s, step.rows, ENTRY), alone, tolerance)


def test_selective_scan(step: Step) -> None:
    channels, size, tokens = 70, 6, step.num_tokens
    x, dt = random(step.device, tokens, channels), random(step.device, tokens, channels)
    parts = random(step.device, tokens, 2 * size + 3)
    b, c = parts[:, 3 : 3 + size], parts[:, 3 + size :]
    weights = SelectiveWeights(random(step.device, channels, size), random(step.device, channels))

    def alone(state: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        step_, now = torch.nn.functional.softplus(dt[token].double()), x[token].double()
        state = (
            state * torch.exp(step_[:, None] * -torch.exp(weights.a_log.double()))
            + (step_ * now)[:, None] * b[token].double()
        )
        return state, state @ c[token].double() + weights.d.double() * now

    state = random(step.device, PAGES, channels, size)
    check(step, state, lambda s: selective_scan(x, dt, b, c, weights, s, step.rows, ENTRY), alone)


@pytest.mark.parametrize(("heads", "key_heads", "key", "value"), [(4, 2, 12, 8), (2, 2, 32, 40)][INTERPRETED:])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_gated_delta_rule(
    step: Step, heads: int, key_heads: int, key: int, value: int, dtype: torch.dtype, tolerance: float
) -> None:
    check_delta(step, (heads, key_heads, key, value), dtype, tolerance)


def test_gated_delta_rule_with_heads_of_whole_tiles(step: Step) -> None:
    check_delta(step, (2, 1, 128, 128), *PRECISIONS[1])


def check_delta(step: Step, sizes: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float) -> None:
    heads, key_heads, key, value = sizes
    tokens, each = step.num_tokens, heads // key_heads
    inner = random(step.device, tokens, 2 * key_heads * key + heads * value).to(dtype)
    q, k, v = inner.split([key_heads * key, key_heads * key, heads * value], 1)
    q, k, v = q.unflatten(1, (key_heads, key)), k.unflatten(1, (key_heads, key)), v.unflatten(1, (heads, value))
    a, b = random(step.device, tokens, 2 * heads).to(dtype).chunk(2, 1)
    weights = DeltaWeights(random(step.device, heads), random(step.device, heads), 2.0)
    decay = -torch.exp(weights.a_log.double()) * torch.nn.functional.softplus(a.double() + weights.dt_bias.double())
    beta = 2 * torch.sigmoid(b.double())

    def unit(x: torch.Tensor) -> torch.Tensor:
        wide = x.double().repeat_interleave(each, 0)
        return wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def alone(state: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        query, own = unit(q[token]) * key**-0.5, unit(k[token])
        state = state * torch.exp(decay[token].double())[:, None, None]
        wrong = v[token].double() - (state * own[..., None]).sum(1)
        state = state + own[..., None] * (wrong * beta[token].double()[:, None])[:, None]
        return state, (state * query[..., None]).sum(1)

    state = random(step.device, PAGES, heads, key, value)
    check(step, state, lambda s: gated_delta(q, k, v, a, b, weights, s, step.rows, ENTRY), alone, tolerance)


@pytest.mark.parametrize(("heads", "key", "value"), [(3, 12, 8), (2, 32, 40)][INTERPRETED:])
def test_delta_rule_whose_columns_fade_by_themselves(step: Step, heads: int, key: int, value: int) -> None:
    """Some at once, some hardly."""
    tokens = step.num_tokens
    inner = random(step.device, tokens, heads * (2 * key + value))
    q, k, v = inner.split([heads * key, heads * key, heads * value], 1)
    q, k, v = (part.unflatten(1, (heads, -1)) for part in (q, k, v))
    decay = -torch.exp(2 * random(step.device, tokens, heads, key))
    beta = torch.sigmoid(random(step.device, tokens, heads))

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def alone(state: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        query, own = unit(q[token]) * key**-0.5, unit(k[token])
        state = state * torch.exp(decay[token].double())[..., None]
        wrong = v[token].double() - (state * own[..., None]).sum(1)
        state = state + own[..., None] * (wrong * beta[token].double()[:, None])[:, None]
        return state, (state * query[..., None]).sum(1)

    state = random(step.device, PAGES, heads, key, value)
    check(step, state, lambda s: channel_delta(q, k, v, decay, beta, s, step.rows, ENTRY), alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("parts", "width", "each"), [(3, 40, False), (1, 1200, True), (5, 16, True)])
@pytest.mark.parametrize(("gate_first", "sigmoid"), [(True, False), (False, False), (False, True)])
def test_gated_norm(
    device: torch.device, parts: int, width: int, each: bool, gate_first: bool, sigmoid: bool, dtype: torch.dtype
) -> None:
    """each: all parts have the same weights."""
    tokens, size = 7, parts * width
    x, beside = torch.randn(tokens, size, device=device, dtype=dtype), torch.randn(tokens, size + 8, device=device)
    gate = beside.to(dtype)[:, 8:]
    weight = torch.randn(width if each else size, device=device, dtype=dtype)
    factor = torch.sigmoid(gate.double()) if sigmoid else torch.nn.functional.silu(gate.double())
    y = (x.double() * factor if gate_first else x.double()).view(tokens, parts, width)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double().view(-1, width)
    expected = y.flatten(1) if gate_first else y.flatten(1) * factor
    found = gated_norm(x, gate, weight, 1e-5, width=width, gate_first=gate_first, sigmoid=sigmoid)
    assert_near(found, expected, dtype)
    assert_near(gate_only(x, gate, sigmoid=sigmoid), x.double() * factor, dtype)
