"""Every kernel that Triton has is there in plain torch as well, does the same, and waits for no device."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.kernels import drafts
from quire.kernels.attention import paged, prompt, qkv, rope
from quire.kernels.attention.latent import LatentTarget, by_head, latent_queries, rope_write
from quire.kernels.attention.latent_expanded import gather_rows
from quire.kernels.attention.scores import Scores
from quire.kernels.dispatch import INTERPRETED, plain_torch
from quire.kernels.draft_state import DraftBuffers, DraftState
from quire.kernels.elementwise import activation, norm
from quire.kernels.elementwise.gated_norm import gate_only, gated_norm
from quire.kernels.gemm import fp8_linear, grouped_linear, int8_linear
from quire.kernels.gemm.codes import Codes
from quire.kernels.gemm.int8_linear import Int8Weight
from quire.kernels.gemm.linear import linear
from quire.kernels.low_rank.factors import Factors
from quire.kernels.low_rank.product import expand, expand_gated_and_shrink, shrink
from quire.kernels.low_rank.rows import adapter_rows
from quire.kernels.moe import experts, gate, routing
from quire.kernels.moe.routes import Rule
from quire.kernels.recurrent.channel_delta import channel_delta
from quire.kernels.recurrent.conv import causal_conv
from quire.kernels.recurrent.delta import DeltaWeights, gated_delta
from quire.kernels.recurrent.rows import make_rows
from quire.kernels.recurrent.selective import SelectiveWeights, selective_scan
from quire.kernels.recurrent.ssd import SSDWeights, ssd
from quire.kernels.sampling import bitmask, sampling
from quire.kernels.sampling.state import History, Scratch
from quire.kernels.step import step
from quire.kernels.step.state import GroupTable, SeatState, StepBuffers
from quire.platforms.transfers import upload
from quire.quantization.fp8 import Fp8Channel
from quire.quantization.grouped import Int4
from tests.kernels.compare import LIMITS, NARROW
from tests.sampling.rows import columns, history

ROOM = Path(__file__).parents[2] / "quire" / "kernels"
SEATS, SIZE, TABLE, DRAFTS = 6, 4, 8, 3
PLAN = "a kernel's plan, or whether it pays: plain torch has none"
INNER = "a way of `linear`, which has a twin"
RANKS = "between ranks: a Group has the library's"
WITHOUT = {
    "decode_workspace": PLAN, "decode_schedule": PLAN, "prefill_schedule": PLAN, "prefill_wave": PLAN, "pays": PLAN,
    "plan": PLAN, "plan_8_bits": PLAN, "schedule": PLAN, "takes": PLAN, "wave": PLAN, "costs": PLAN,
    "decode_gemm.linear": INNER, "fp8_blocks.linear": INNER, "gated": INNER, "by_library": INNER,
    "linear_and_shrink": INNER, "in_parts.linear": INNER,
    "norms_inside": PLAN, "has_gluon": PLAN, "has_ahead": PLAN, "summands": INNER,
    "reduce_add_norm": RANKS, "gather_columns": RANKS, "from_first": RANKS, "draw_apart": RANKS, "parts_adder": RANKS,
}  # fmt: skip
Results = list[torch.Tensor]


def public_kernels() -> set[str]:
    """Functions that import Triton's side of themselves; `linear`s by their file as well."""
    found = set()
    for file in ROOM.rglob("*.py"):
        if "triton" in file.parts:
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            modules = [n.module or "" for n in ast.walk(node) if isinstance(n, ast.ImportFrom)]
            if any("triton" in module for module in modules):
                found.add(f"{file.stem}.{node.name}" if node.name == "linear" else node.name)
    return found


def random(device: torch.device, *shape: int, dtype: torch.dtype = NARROW) -> torch.Tensor:
    return upload(torch.randn(shape).to(dtype), device)


def ints(values: object, device: torch.device) -> torch.Tensor:
    return upload(torch.tensor(values, dtype=torch.int32), device)


def seated(device: torch.device) -> tuple[SeatState, DraftState]:
    """Requests of 5, 9, … tokens that repeat themselves; one at its limit, seat 0 is nobody's."""
    table = torch.cat([torch.zeros(1, TABLE), torch.randperm((SEATS - 1) * TABLE).view(SEATS - 1, TABLE) + 1])
    tokens = torch.arange((SEATS * TABLE + 1) * SIZE) % 3 + 11
    state = SeatState(
        ints([0, 7, 8, 9, 10, 11], device), ints([0, 5, 9, 13, 17, 21], device), upload(table.int(), device),
        upload(tokens.int(), device), SIZE, ints([0, 30, 10, 0, 20, 32], device),
    )  # fmt: skip
    made = upload(torch.arange(SEATS * DRAFTS, dtype=torch.int32).view(SEATS, DRAFTS), device)
    return state, DraftState(made, ints([0, 3, 1, 0, 2, 3], device), ints([0, 1, 1, 1, 0, 1], device))


def buffers(tokens: int, rows: int, device: torch.device) -> StepBuffers:
    return StepBuffers(*(ints([-9] * n, device) for n in (tokens, tokens, tokens, rows)))


def told(state: SeatState, made: DraftState | None = None, out: StepBuffers | None = None) -> Results:
    results = [state.last_token, state.num_computed, state.token_of_slot]
    results += [made.tokens, made.count] if made else []
    return results + ([out.input_ids, out.positions, out.slots, out.seq_lens] if out else [])


def decode_rows(device: torch.device) -> Results:
    (q, *cache), seats = (
        (random(device, 5, 4, 32), *(random(device, 40, 2, 16, 32) for _ in "kv")),
        ints([*range(5)], device),
    )
    table, lens = ints(torch.arange(40).view(5, 8).tolist(), device), ints([1, 17, 33, 90, 128], device)
    schedule = paged.decode_schedule(seats, lens, 4, 2, 32, NARROW)
    return [paged.decode(q, *cache, table, schedule, 0.2, paged.decode_workspace(5, 4, 2, 32, device))]


def prefill_rows(device: torch.device) -> Results:
    (q, *cache), seats = (
        (random(device, 40, 4, 32), *(random(device, 40, 2, 16, 32) for _ in "kv")),
        ints([4, 1], device),
    )
    table, starts, lens = (
        ints(torch.arange(40).view(5, 8).tolist(), device),
        ints([0, 30, 40], device),
        ints([90, 10], device),
    )
    schedule = paged.prefill_schedule(seats, starts, lens, 40, 30, 4, 2, 32, 16, NARROW, Scores(20))
    return [paged.prefill(q, *cache, table, schedule, 0.2)]


def whole_prompts(device: torch.device) -> Results:
    q, k, v = random(device, 31, 8, 16).split([4, 2, 2], dim=1)
    rows = (ints([0, 20, 31], device), 2, 20, 0.25)
    found = []
    for window, keys in ((0, None), (4, ints([12, 11], device))):
        out = torch.empty(31, 64, dtype=NARROW, device=device)
        found.append(prompt.attend(q, k, v, *rows, out, window=window, num_keys=keys))
        assert found[-1].isfinite().all()
    found[-1] = torch.cat([found[-1][:15], found[-1][20:]])  # from the 16th on tokens of the first row see none
    return found


def place(device: torch.device, tokens: int) -> rope.QkvTarget:
    slots = torch.randperm(96)[:tokens]
    slots[3] = slots[5] = -1
    angles = torch.randn(64, 16)
    return rope.QkvTarget(
        upload(torch.cat([angles.cos(), angles.sin()], 1), device),
        ints(torch.randint(0, 64, (tokens,)).tolist(), device), upload(slots.int(), device),
        *(torch.full((6, 2, 16, 32), 7.0, dtype=NARROW, device=device) for _ in "kv"), 4, 2, 32,
        random(device, 32), random(device, 32),
    )  # fmt: skip


def rotated(device: torch.device) -> Results:
    at = place(device, 12)
    return [rope.qk_norm_rope_write(random(device, 12, 256), *at), at.k_cache, at.v_cache]


def projected(device: torch.device) -> Results:
    at, gain = place(device, 12), (random(device, 96), 1e-6)
    return [qkv.qkv_rope_write(random(device, 12, 96), random(device, 256, 96), None, gain, at), at.k_cache, at.v_cache]


def products(device: torch.device) -> Results:
    gain, weight = (random(device, 96), 1e-6), random(device, 64, 96) * 0.1
    found = []
    for rows in (1, 12, 70):
        x, residual = random(device, rows, 96), random(device, rows, 64)
        found += [
            linear(x, weight), linear(x, weight, norm=gain, gated=True), linear(x, weight, residual=residual.clone()),
            linear(x, weight, random(device, 64), out_dtype=torch.float32),
        ]  # fmt: skip
    return found


def products_of_8_bits(device: torch.device) -> Results:
    packed = Fp8Channel().pack(random(device, 64, 96) * 0.1)
    x = random(device, 12, 96)
    found = fp8_linear.linear(x, packed["weight"], packed["weight_scale"], norm=(random(device, 96), 1e-6))
    assert isinstance(found, torch.Tensor)
    wide, narrow = fp8_linear.rms_norm_both(x, random(device, 96), 1e-6)
    return [found, wide, narrow.values.float() * narrow.scale[:, None]]


def products_of_codes(device: torch.device) -> Results:
    packed = Int4().pack(random(device, 40, 192))
    weight = Codes("int4", 128, packed["codes"], packed["scale"])
    return [grouped_linear.linear(random(device, 9, 192), weight), grouped_linear.widened(weight, torch.float32)]


def products_of_integers(device: torch.device) -> Results:
    values = torch.randint(-127, 128, (40, 96), dtype=torch.int8)
    kept = (values, torch.rand(40) / 100, torch.full((1,), 0.03), torch.full((1,), 5.0), values.sum(1).float())
    weight = Int8Weight(*(upload(tensor, device) for tensor in kept))
    x = random(device, 9, 96)
    return [
        int8_linear.linear(x, Int8Weight(*weight[:2]), gated=True),
        int8_linear.linear(x, weight, random(device, 40), residual=random(device, 9, 40)),
    ]


def gathered(device: torch.device) -> Results:
    state, _ = seated(device)
    out = buffers(14, 4, device)
    starts = ints([0, 1, 2, 9, 12], device)
    step.gather(state, out, ints([2, 5, 3, 1], device), starts, ints([*range(50, 60)], device), 2, 7)
    other, slots = GroupTable(state.block_table + 100, SIZE), ints([-9] * 14, device)
    step.find_slots(other, ints([2, 5, 3, 1], device), starts, out.positions, out.slots, slots, 7)
    return [*told(state, out=out), slots]


def gathered_decodes(device: torch.device) -> Results:
    state, _ = seated(device)
    out = buffers(5, 5, device)
    step.gather_decode(state, out, ints([4, 2, 1, 0, 0], device))
    return told(state, out=out)


def committed(device: torch.device) -> Results:
    state, _ = seated(device)
    told_tokens = ints([0] * 5, device)
    sampled, index = ints([71, 72], device), ints([1, -1, 0, -1, -1], device)
    step.commit(state, told_tokens, ints([4, 2, 1, 0, 0], device), ints([18, 10, 6, 1, 1], device), sampled, index)
    return [*told(state), told_tokens]


def scattered(device: torch.device) -> Results:
    table = torch.zeros(5, 6, dtype=torch.int32, device=device)
    step.scatter(table, ints([4, 29, 0], device), ints([1, 2, 3], device))
    return [table]


def drafted(device: torch.device) -> Results:
    state, made = seated(device)
    seats, width = ints([5, 2, 1, 4, 0, 0], device), made.width
    out = buffers(6 * width, 6, device)
    more = DraftBuffers(*(ints([-9] * n, device) for n in (6 * width, 6 * width, 6, 6)))
    drafts.gather_drafted(state, made, out, more, seats)
    sampled = ints([15, 16, 3, 4] * 6, device)
    outcome = torch.zeros(6, width + 2, dtype=torch.int32, device=device)
    drafts.commit_drafted(state, outcome, more, seats, out.input_ids, sampled)
    return [*told(state, made, out), outcome, more.seats, more.lengths, more.first_lens, more.used]


def probed(device: torch.device) -> Results:
    _, made = seated(device)
    outcome = torch.zeros(5, made.width + 2, dtype=torch.int32, device=device)
    drafts.probe(made, outcome, ints([5, 2, 1, 4, 0], device), ints([15, 6, 0, 12, 0], device), 4)
    return [outcome]


def proposed(device: torch.device) -> Results:
    state, made = seated(device)
    drafts.propose_ngram(state, made, ints([5, 2, 1, 4, 3, 0], device), ints([0] * 6, device), 3, 1)
    return [made.count, made.tokens]


ROWS = [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_p": 0.9, "temperature": 1.5}]


def sampled(device: torch.device) -> Results:
    out = ints([-1] * 5, device)
    rows = upload(columns([{**row, "seed": 3 + seed} for seed, row in enumerate(ROWS)]), device)
    logits, seats = upload(torch.randn(5, 300), device), ints([1, 2, 3, 4, 5], device)
    scratch = Scratch.allocate(5, 1, 300, device)
    sampling.sample(logits, rows, seats, ints([4, 5, 6, 7, 8], device), out, scratch, filtered=True)
    return [out]


def penalized(device: torch.device) -> Results:
    paged_texts, seats, lengths = history([[5, 5, 7], [1, 2, 3, 1], [9]])
    texts = History(upload(paged_texts.token_of_slot, device), upload(paged_texts.block_table, device), 4)
    rows = columns(
        [{"num_prompt": 1, "repetition_penalty": 1.3, "frequency_penalty": 0.5}, {}, {"presence_penalty": 1}]
    )
    logits = upload(torch.randn(3, 300), device)
    scratch = Scratch.allocate(1, 3, 300, device)
    sampling.penalize(logits, *(upload(x, device) for x in (rows, seats, lengths)), texts, scratch)
    return [logits]


def masked(device: torch.device) -> Results:
    logits = upload(torch.randn(5, 300), device)
    bits = torch.randint(-(2**31), 2**31 - 1, (2, 10), dtype=torch.int32)
    bitmask.apply_bitmask(logits, ints([4, 1], device), upload(bits, device))
    return [logits.clamp(min=-1e9)]


def normed(device: torch.device) -> Results:
    x, weight = random(device, 9, 96), random(device, 96)
    added = norm.add_rms_norm(random(device, 9, 96), x, weight, 1e-6, 0.5)
    pair = norm.rms_norm_pair(random(device, 9, 128), (weight, random(device, 24)), 1e-6)
    return [norm.rms_norm(x, weight, 1e-6), added, pair, norm.layer_norm(x, weight, weight, 1e-6)]


def activated(device: torch.device) -> Results:
    pairs = random(device, 9, 96)
    capped = activation.softcap_(random(device, 5, 300, dtype=torch.float32), 30.0, 0.5)
    squared = activation.relu2(random(device, 5, 300))
    return [activation.silu_and_mul(pairs), activation.gelu_tanh_and_mul(pairs), capped, squared]


def mixed(device: torch.device) -> Results:
    rule = Rule(8, 2, renormalize=True)
    routes = routing.route(random(device, 9, 8, dtype=torch.float32), rule)
    x, residual = random(device, 9, 64), random(device, 9, 64)
    gate_up, down = random(device, 8, 64, 64) / 8, random(device, 8, 64, 32) / 8
    found = experts.add_experts(x, routes, gate_up, down, residual)
    return [routes.experts, routes.weights, found, gate.sigmoid_gate(random(device, 9, 64), x, random(device, 1, 64))]


def latent_turned(device: torch.device) -> Results:
    """Queries and the one row that a token keeps, of which the last columns turn."""
    q, rows = random(device, 5, 3, 16), random(device, 5, 48)
    out, cache = torch.zeros_like(q), torch.zeros(4, 1, 16, 48, dtype=NARROW, device=device)
    norm, angles = (random(device, 32), 1e-6), random(device, 20, 16, dtype=torch.float32)
    positions, slots = ints([0, 7, 3, 19, 2], device), ints([17, 40, 18, 16, 63], device)
    rope_write(q, rows, out, norm, angles, positions, slots, cache, False)
    return [out, cache]


def latents_of_heads(device: torch.device) -> Results:
    """Queries of the same rows, and heads' results."""
    q, rows, keys = random(device, 5, 3, 40), random(device, 5, 48), random(device, 3, 24, 32)
    cache, angles = torch.zeros(4, 1, 16, 48, dtype=NARROW, device=device), random(device, 20, 16, dtype=torch.float32)
    positions, slots = ints([0, 7, 3, 19, 2], device), ints([17, 40, 18, 16, 63], device)
    norm, target = (random(device, 32), 1e-6), LatentTarget(angles, positions, slots, cache, True)
    values = random(device, 3, 20, 32).transpose(1, 2)
    return [latent_queries(q, rows, keys, norm, target), cache, by_head(random(device, 5, 3, 32), values)]


def adapted(device: torch.device) -> Results:
    ends, made = (32, 64), [random(device, 2, 32, 96), random(device, 2, 16, 64), random(device, 2, 64).float()]
    given = Factors(*made, ints([[16, 0], [3, 1]], device), ints([0, *ends], device), ends)
    rows = adapter_rows(ints([2, 0, 1, 2, 0, 1, 1], device), 2)
    x, y = random(device, 7, 96) / 10, random(device, 7, 64)
    inner = shrink(x, rows, given)
    found = [expand(y.clone(), shrink(x, rows, given), rows, given), expand(y.clone(), inner, rows, given, gated=True)]
    reader = Factors(
        *(random(device, 2, *shape) for shape in ((16, 32), (16, 8), (8,))), given.ranks, given.edges, (8,)
    )
    found.append(expand_gated_and_shrink(y.clone(), inner, rows, given, None, reader)[0])
    return [*found, expand(y, inner, rows, given, residual=random(device, 7, 64))]


def latents_there(device: torch.device) -> Results:
    cache, table = random(device, 9, 1, 4, 20), ints([[0, 0, 0], [8, 3, 1], [2, 7, 5]], device)
    seats, starts, lens, counters = (ints(values, device) for values in ([2, 1], [0, 11], [11, 6], [3, 4]))
    out = random(device, 21, 20)
    gather_rows(cache, table, seats, starts, lens, counters, out)
    return [out, counters]


def moved_on(device: torch.device) -> Results:
    """A row that decodes, one of nobody's, a chunk that begins anew, and a token of padding."""
    table, seats = ints([[0], [2], [3]], device), ints([1, 0, 2], device)
    rows = make_rows(8, 2, 5, seats, ints([0, 1, 2, 7], device), ints([9, 1, 5], device), table)
    results: Results = []

    def kept(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        results.append(random(device, 4, *shape, dtype=dtype))
        return results[-1]

    def numbers(*shape: int) -> torch.Tensor:
        return random(device, *shape, dtype=torch.float32)

    x = random(device, 8, 24)
    results.append(causal_conv(x, random(device, 24, 4), random(device, 24), kept(3, 24, dtype=NARROW), rows, 0)[:7])
    heads, pairs = random(device, 8, 2, 12), random(device, 8, 2, 8)
    weights = SSDWeights(numbers(2), numbers(2), numbers(2), (0.0, 9.0))
    results.append(ssd(heads, pairs[:, :1], pairs[:, 1:], random(device, 8, 2), weights, kept(2, 12, 8), rows, 0)[:7])
    by_channel = SelectiveWeights(numbers(24, 8), numbers(24))
    steps, (b, c) = random(device, 8, 24), (random(device, 8, 8) for _ in "bc")
    results.append(selective_scan(x, steps, b, c, by_channel, kept(24, 8), rows, 0)[:7])
    q, k = pairs[:, :1], pairs[:, 1:]
    own, (a, b) = DeltaWeights(numbers(2), numbers(2)), (random(device, 8, 2) for _ in "ab")
    results.append(gated_delta(q, k, heads, a, b, own, kept(2, 8, 12), rows, 0)[:7])
    q, k, decay = random(device, 8, 2, 8), random(device, 8, 2, 8), -numbers(8, 2, 8).abs()
    beta = torch.sigmoid(numbers(8, 2))
    results.append(channel_delta(q, k, heads, decay, beta, kept(2, 8, 12), rows, 0)[:7])
    results += [gated_norm(x, x, random(device, 8), 1e-5, width=8), gate_only(x, x)]
    return results


CASES: dict[Callable[[torch.device], Results], tuple[str, ...]] = {
    decode_rows: ("decode",), prefill_rows: ("prefill",), whole_prompts: ("attend",), projected: ("qkv_rope_write",),
    rotated: ("qk_norm_rope_write",), products: ("linear",), products_of_8_bits: ("fp8_linear", "rms_norm_both"),
    products_of_codes: ("widened",),
    masked: ("apply_bitmask",), gathered: ("gather", "find_slots"), gathered_decodes: ("gather_decode",),
    committed: ("commit",),
    scattered: ("scatter",), drafted: ("gather_drafted", "commit_drafted"), probed: ("probe",),
    normed: ("rms_norm", "add_rms_norm", "rms_norm_pair", "layer_norm"), products_of_integers: ("int8_linear",),
    proposed: ("propose_ngram",), sampled: ("sample",), penalized: ("penalize",),
    moved_on: ("causal_conv", "ssd", "selective_scan", "gated_delta", "channel_delta", "gated_norm", "gate_only"),
    activated: ("silu_and_mul", "gelu_tanh_and_mul", "softcap_", "relu2"),
    mixed: ("route", "add_experts", "sigmoid_gate"),
    adapted: ("adapter_rows", "shrink", "expand", "expand_gated_and_shrink"),
    latent_turned: ("rope_write",), latents_of_heads: ("latent_queries", "by_head"), latents_there: ("gather_rows",),
}  # fmt: skip
# References; on a device `SDPAttention` takes the place of the first three, and experts and adapters come one after
# another.
ROW_BY_ROW = {decode_rows, prefill_rows, whole_prompts, mixed, adapted}


def test_every_kernel_has_a_case() -> None:
    named = {name for names in CASES.values() for name in names}
    assert public_kernels() - WITHOUT.keys() == named - {"linear", "fp8_linear", "int8_linear"}
    assert WITHOUT.keys() <= public_kernels()


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_same_in_plain_torch(case: Callable[[torch.device], Results], place: str) -> None:
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if INTERPRETED and case is products_of_8_bits:
        pytest.skip("Triton's interpreter rounds 8-bit floats otherwise")
    device = torch.device(place)
    torch.manual_seed(0)
    expected = case(device)
    torch.manual_seed(0)
    with plain_torch():
        found = case(device)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        if not theirs.is_floating_point():
            assert torch.equal(ours, theirs)
            continue
        error = torch.linalg.vector_norm(ours.double() - theirs.double()) / torch.linalg.vector_norm(theirs.double())
        # Both have rounded, some of it twice on the way; rows in 8 bits are for matrix units.
        assert error <= (0.05 if case is products_of_8_bits else 3 * LIMITS[NARROW])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", [case for case in CASES if case not in ROW_BY_ROW], ids=lambda case: case.__name__)
def test_nothing_waits(case: Callable[[torch.device], Results]) -> None:
    """A case's own tensors cross without a wait, so that only the kernels could."""
    with plain_torch():
        case(torch.device("cuda"))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            case(torch.device("cuda"))
        finally:
            torch.cuda.set_sync_debug_mode("default")
