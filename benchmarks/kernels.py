"""Times every kernel on the shapes of two models and puts the achieved rate beside the library's.

    python benchmarks/kernels.py [--only decode,linear] [--json results.json]
    python benchmarks/kernels.py --only backends     all attention backends that are installed, side by side
    python benchmarks/kernels.py --only latent       latent attention (MLA), its last column the floor

Each line is the median of ten CUDA-graph replays of a chain of calls over buffers that rotate past the L2 cache,
divided by the calls. Bytes are the least that must move (inputs read once, outputs written once). An attention backend
that graphs cannot hold is launched from Python, as engines do it: what that takes is part of its time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import chip
from quire.attention.base import AttentionInputs, AttentionSpec, LayerCache, prefix_tile_rows, prefix_tiles
from quire.config.attention import ATTENTION_BACKENDS
from quire.kernels.attention import latent_expanded, latent_paged, qkv, rope
from quire.kernels.attention import paged as paged_attention
from quire.kernels.attention.latent import by_head
from quire.kernels.attention.latent_rows import LatentRows
from quire.kernels.attention.scores import PLAIN
from quire.kernels.elementwise import activation, norm
from quire.kernels.gemm import fp8_linear, in_parts
from quire.kernels.gemm.linear import linear
from quire.kernels.gemm.triton.plan import plan
from quire.quantization.base import FORMATS, WeightFormat
from quire.quantization.fp8 import Fp8Channel

DEVICE, DTYPE, BLOCK_SIZE = torch.device("cuda"), torch.bfloat16, 16
PAST_L2 = 256 * 2**20  # bytes that a chain of calls must touch before it comes back to its first buffer


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    qk_norm: bool

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


MODELS = [
    Model("qwen3-0.6b", 1024, 16, 8, 128, 3072, 151936, True),
    Model("llama-3.1-8b", 4096, 32, 8, 128, 14336, 128256, False),
]


@dataclass
class Line:
    kernel: str
    model: str
    shape: str
    us: float
    rate: float
    unit: str  # GB/s or TFLOP/s
    library_us: float | None = None


def microseconds(calls: list[Callable[[], object]], replays: int = 10) -> float:
    """Time of one call, as the median over replays of a graph that holds all of `calls` once."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def copies(num_bytes: int, least: int = 8, most: int = 64) -> int:
    """How many buffers of `num_bytes` a chain needs."""
    return min(max(PAST_L2 // num_bytes + 1, least), most)


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def bench_small(model: Model) -> Iterator[Line]:
    weight, head_weight = random(model.hidden), random(model.dim) if model.qk_norm else None
    table = random(8192, model.dim, dtype=torch.float32)
    for tokens in (1, 64, 8192):
        size = tokens * model.hidden * 2
        inputs = [random(tokens, model.hidden) for _ in range(copies(2 * size))]
        us = microseconds([partial(norm.rms_norm, x, weight, 1e-6) for x in inputs])
        library = microseconds([partial(F.rms_norm, x, (model.hidden,), weight, 1e-6) for x in inputs])
        yield Line("rms_norm", model.name, f"{tokens}", us, 2 * size / us / 1e3, "GB/s", library)

        size = tokens * model.inner * 2
        inputs = [random(tokens, 2 * model.inner) for _ in range(copies(3 * size))]
        us = microseconds([partial(activation.silu_and_mul, x) for x in inputs])
        yield Line("silu_and_mul", model.name, f"{tokens}", us, 3 * size / us / 1e3, "GB/s")

        size = tokens * model.qkv * 2
        inputs = [random(tokens, model.qkv) for _ in range(copies(2 * size))]
        positions = torch.arange(tokens, device=DEVICE, dtype=torch.int32)
        k_cache, v_cache = (random(tokens // BLOCK_SIZE + 2, model.kv_heads, BLOCK_SIZE, model.dim) for _ in "kv")
        us = microseconds([
            partial(
                rope.qk_norm_rope_write, x, table, positions, positions, k_cache, v_cache, model.heads,
                model.kv_heads, model.dim, head_weight, head_weight,
            )
            for x in inputs
        ])  # fmt: skip
        yield Line("qk_norm_rope_write", model.name, f"{tokens}", us, 2 * size / us / 1e3, "GB/s")


@dataclass
class Paged:
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    seats: list[torch.Tensor]  # one a set of rows
    seq_lens: torch.Tensor


def paged(model: Model, seq_lens: list[int], sets: int, dtype: torch.dtype = DTYPE) -> Paged:
    """A cache for `sets` batches of the same lengths, its blocks in random order."""
    counts = [-(-n // BLOCK_SIZE) for n in seq_lens] * sets
    order = (torch.randperm(sum(counts), device=DEVICE) + 1).int()
    table = torch.zeros(len(counts) + 1, max(counts), device=DEVICE, dtype=torch.int32)
    for i, part in enumerate(order.split(counts)):
        table[i + 1, : len(part)] = part
    k, v = (random(sum(counts) + 1, model.kv_heads, BLOCK_SIZE, model.dim).to(dtype) for _ in "kv")
    seats = (torch.arange(len(counts), device=DEVICE, dtype=torch.int32) + 1).split(len(seq_lens))
    return Paged(k, v, table, list(seats), torch.tensor(seq_lens, device=DEVICE, dtype=torch.int32))


@dataclass
class DecodeCase:
    """Batches of decode rows over one cache, each with its schedule."""

    model: Model
    cache: Paged
    schedules: list[paged_attention.DecodeSchedule]
    q: torch.Tensor
    workspace: torch.Tensor
    num_bytes: int  # of K and V that one call must read

    def call(self, index: int, q: torch.Tensor) -> torch.Tensor:
        cache, schedule = self.cache, self.schedules[index % len(self.schedules)]
        return paged_attention.decode(q, cache.k, cache.v, cache.table, schedule, self.model.dim**-0.5, self.workspace)


def decode_case(model: Model, seq_lens: list[int], dtype: torch.dtype = DTYPE) -> DecodeCase:
    """dtype: of the cache."""
    rows, size = len(seq_lens), sum(seq_lens) * model.kv_heads * model.dim * 2 * dtype.itemsize
    cache = paged(model, seq_lens, copies(size, least=2), dtype)
    workspace = paged_attention.decode_workspace(rows, model.heads, model.kv_heads, model.dim, DEVICE)
    schedules = [
        paged_attention.decode_schedule(seats, cache.seq_lens, model.heads, model.kv_heads, model.dim, dtype)
        for seats in cache.seats
    ]
    return DecodeCase(model, cache, schedules, random(rows, model.heads, model.dim), workspace, size)


def bench_decode(model: Model) -> Iterator[Line]:
    batches = {
        f"{rows}x{length}": [length] * rows
        for rows, length in [(1, 256), (1, 4096), (1, 32768), (8, 1024), (64, 256), (64, 1024), (64, 4096), (256, 1024)]
    }
    batches["2x32768+62x256"] = [32768] * 2 + [256] * 62
    batches["256x100..2048"] = torch.linspace(100, 2048, 256).int().tolist()
    for name, seq_lens in batches.items():
        case = decode_case(model, seq_lens)
        us = microseconds([partial(case.call, i, case.q) for i in range(len(case.schedules))])
        yield Line("decode", model.name, name, us, case.num_bytes / us / 1e3, "GB/s")
    for rows, length in [(8, 300), (1, 32768), (64, 1024), (256, 1024)]:
        case = decode_case(model, [length] * rows, torch.float8_e4m3fn)
        us = microseconds([partial(case.call, i, case.q) for i in range(len(case.schedules))])
        yield Line("decode, 8 bits", model.name, f"{rows}x{length}", us, case.num_bytes / us / 1e3, "GB/s")
    for rows, length, own in [(16, 1024, 64), (64, 4096, 100), (256, 4096, 100)]:
        case = shared_case(model, rows, length, own)
        us = microseconds([partial(case.call, i, case.q) for i in range(len(case.schedules))])
        yield Line("decode, shared", model.name, f"{rows}x({length}+{own})", us, case.num_bytes / us / 1e3, "GB/s")


def shared_case(model: Model, rows: int, length: int, own: int) -> DecodeCase:
    """Rows of which the first `length` tokens lie in the same blocks; bytes: these once, and each row's own tokens."""
    case = decode_case(model, [length + own] * rows)
    group = model.heads // model.kv_heads
    tile_rows, cache = prefix_tile_rows(group), case.cache
    rounded = length // BLOCK_SIZE
    members = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    for i, seats in enumerate(cache.seats):
        cache.table[seats.long(), :rounded] = cache.table[seats[0].long(), :rounded]
        tiles = torch.zeros(prefix_tiles(rows, group), 4, device=DEVICE, dtype=torch.int32)
        for j, begin in enumerate(range(0, rows, tile_rows)):
            number = min(rows - begin, tile_rows)
            tiles[j] = torch.tensor([int(seats[begin]), begin, number, length])
        case.schedules[i] = paged_attention.decode_schedule(
            seats, cache.seq_lens, model.heads, model.kv_heads, model.dim, DTYPE, PLAIN,
            (torch.full_like(members, length), members, tiles),
        )  # fmt: skip
    case.num_bytes = (length + rows * own) * model.kv_heads * model.dim * 4
    return case


def prefill_case(model: Model, rows: int, queries: int, length: int) -> tuple[Paged, torch.Tensor, torch.Tensor, float]:
    """Cache, queries, their offsets and the floating-point operations of one call."""
    cache = paged(model, [length] * rows, 1)
    q = random(rows * queries, model.heads, model.dim)
    starts = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32) * queries
    pairs = rows * (queries * (length - queries) + queries * (queries + 1) / 2)
    return cache, q, starts, 4 * pairs * model.heads * model.dim


def bench_prefill(model: Model) -> Iterator[Line]:
    for rows, queries, length in [
        (1, 1024, 1024), (1, 8192, 8192), (1, 8192, 32768), (2, 4096, 4096), (8, 1024, 1024), (16, 512, 512),
        (64, 64, 4160),
    ]:  # fmt: skip
        cache, q, starts, flops = prefill_case(model, rows, queries, length)
        schedule = paged_attention.prefill_schedule(
            cache.seats[0], starts, cache.seq_lens, len(q), queries, model.heads, model.kv_heads, model.dim, BLOCK_SIZE,
            DTYPE,
        )  # fmt: skip
        call = partial(paged_attention.prefill, q, cache.k, cache.v, cache.table, schedule, model.dim**-0.5)
        us = microseconds([call] * 4)
        library = None
        if queries == length:  # the library reads contiguous K and V
            ours = [random(rows, n, queries, model.dim) for n in (model.heads, model.kv_heads, model.kv_heads)]
            call = partial(F.scaled_dot_product_attention, *ours, is_causal=True, enable_gqa=True)
            library = microseconds([call] * 4)
        yield Line("prefill", model.name, f"{rows}x{queries}/{length}", us, flops / us / 1e6, "TFLOP/s", library)


def bench_linear(model: Model) -> Iterator[Line]:
    """Each product of a layer with what is fused around it, beside the library's product alone."""
    hidden, gain = model.hidden, (random(model.hidden), 1e-6)
    shapes = [("qkv", hidden, model.qkv), ("o", model.heads * model.dim, hidden), ("gate_up", hidden, 2 * model.inner),
              ("down", model.inner, hidden), ("head", hidden, model.vocab)]  # fmt: skip
    for name, k, n in shapes:
        weights = [random(n, k) for _ in range(copies(n * k * 2, least=4))]
        for m in (1, 2, 4, 8, 16):
            x, y = random(m, k), random(m, n)
            around: dict[str, Any] = {
                "qkv": {"norm": gain}, "o": {"residual": y}, "gate_up": {"norm": gain, "gated": True},
                "down": {"residual": y}, "head": {"norm": gain, "out_dtype": torch.float32},
            }[name]  # fmt: skip
            us = microseconds([partial(linear, x, w, **around) for w in weights])
            library = microseconds([partial(F.linear, x, w) for w in weights])
            yield Line("linear", model.name, f"{m}x{k}->{n}", us, n * k * 2 / us / 1e3, "GB/s", library)
        del weights


def bench_in_parts(model: Model) -> Iterator[Line]:
    """Products of two or four ranks in parts of K (*: so many are chosen), beside whole ones."""
    for size in (2, 4):
        for name, k, n, chosen in (
            ("qkv", model.hidden, model.qkv // size, in_parts.parts_to_rotate),
            ("o", model.heads * model.dim // size, model.hidden, in_parts.parts_to_sum),
            ("down", model.inner // size, model.hidden, in_parts.parts_to_sum),
        ):
            weights = [random(n, k) for _ in range(copies(n * k * 2, least=4))]
            for m in (24, 40, 64, 96, 128, 136, 160, 192, 224, 256):
                x, out = random(m, k), random(m, n)
                whole = microseconds([partial(torch.mm, x, w.t(), out=out) for w in weights])
                best = chosen(x, weights[0])
                for parts in sorted({2, 4, max(best, 2)}):
                    us = microseconds([partial(in_parts.linear, x, w, parts) for w in weights])
                    mark, rate = "*" if parts == best else "", 2 * m * n * k / us / 1e6
                    yield Line(
                        f"{name} of {size}/{parts}{mark}", model.name, f"{m}x{k}->{n}", us, rate, "TFLOP/s", whole
                    )
            del weights


def bench_batch(model: Model) -> Iterator[Line]:
    """Products with what rides along, beside the library's product and kernels of their own for the rest."""
    gain = random(model.hidden)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(norm.rms_norm(x, gain, 1e-6), weight)

    def mlp(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return activation.silu_and_mul(plain(x, weight))

    for k, n, gated, normed in [
        (model.hidden, model.qkv, False, True), (model.heads * model.dim, model.hidden, False, False),
        (model.hidden, model.inner, True, True), (model.inner, model.hidden, False, False),
    ]:  # fmt: skip
        size = n * k * (4 if gated else 2)
        weights = [random(size // k // 2, k) for _ in range(copies(size, least=4))]
        for m in (24, 32, 64, 112, 128):
            if plan(m, n, k, gated=gated, residual=not normed, bulk=True) is None:
                continue
            x, residual = random(m, k), None if normed else random(m, n)
            us = microseconds([
                partial(linear, x, w, norm=(gain, 1e-6) if normed else None, gated=gated, residual=residual)
                for w in weights
            ])  # fmt: skip
            around = partial(torch.addmm, residual, out=residual) if residual is not None else mlp if gated else plain
            library = microseconds([partial(around, x, w if normed else w.t()) for w in weights])
            yield Line("batch", model.name, f"{m}x{k}->{n}", us, size / us / 1e3, "GB/s", library)


def bench_wide(model: Model) -> Iterator[Line]:
    """Gate and up projection of prompts, beside the library's product with a kernel for the activation."""
    n, k = model.inner, model.hidden
    for m in (256, 512, 1024, 2048, 4096, 8192, 16384):
        weights = [random(2 * n, k) for _ in range(4)]
        inputs = [random(m, k) for _ in range(4)]
        us = microseconds([partial(linear, x, w, gated=True) for x, w in zip(inputs, weights, strict=True)])
        library = microseconds([
            partial(lambda x, w: activation.silu_and_mul(F.linear(x, w)), x, w)
            for x, w in zip(inputs, weights, strict=True)
        ])  # fmt: skip
        yield Line("gate_up", model.name, f"{m}x{k}->{n}", us, 4 * m * n * k / us / 1e6, "TFLOP/s", library)
        del weights, inputs


def bench_qkv(model: Model) -> Iterator[Line]:
    """From the residual of prompts to attention's inputs, beside the library's product with kernels for the rest."""
    k, gain = model.hidden, (random(model.hidden), 1e-6)
    table, head_weight = random(8192, model.dim, dtype=torch.float32), random(model.dim) if model.qk_norm else None
    for m in (1024, 2048, 4096, 8192, 16384):
        weights = [random(model.qkv, k) for _ in range(4)]
        inputs = [random(m, k) for _ in range(4)]
        positions = torch.arange(m, device=DEVICE, dtype=torch.int32) % len(table)
        slots = torch.randperm(m // BLOCK_SIZE, device=DEVICE).repeat_interleave(BLOCK_SIZE).int() * BLOCK_SIZE
        slots += torch.arange(m, device=DEVICE, dtype=torch.int32) % BLOCK_SIZE
        k_cache, v_cache = random(2, m // BLOCK_SIZE, model.kv_heads, BLOCK_SIZE, model.dim)
        place = rope.QkvTarget(
            table, positions, slots, k_cache, v_cache, model.heads, model.kv_heads, model.dim, head_weight, head_weight
        )

        def apart(x: torch.Tensor, weight: torch.Tensor, place: rope.QkvTarget = place) -> torch.Tensor:
            return rope.qk_norm_rope_write(F.linear(norm.rms_norm(x, *gain), weight), *place)

        us = microseconds([
            partial(qkv.qkv_rope_write, x, w, None, gain, place) for x, w in zip(inputs, weights, strict=True)
        ])  # fmt: skip
        library = microseconds([partial(apart, x, w) for x, w in zip(inputs, weights, strict=True)])
        yield Line("qkv", model.name, f"{m}x{k}->{model.qkv}", us, 2 * m * model.qkv * k / us / 1e6, "TFLOP/s", library)
        del weights, inputs


@dataclass
class Layer:
    """A decoder layer's decode step, chained as in the model."""

    model: Model
    attention: DecodeCase
    index: int
    weights: list[torch.Tensor]  # qkv, o, gate_up, down
    gain: torch.Tensor
    head_gain: torch.Tensor | None
    table: torch.Tensor
    positions: torch.Tensor
    residual: torch.Tensor

    def __call__(self) -> None:
        m, cache, (qkv_weight, o, gate_up, down) = self.model, self.attention.cache, self.weights
        place = rope.QkvTarget(
            self.table,
            self.positions,
            self.positions,
            cache.k,
            cache.v,
            m.heads,
            m.kv_heads,
            m.dim,
            self.head_gain,
            self.head_gain,
        )
        q = qkv.qkv_rope_write(self.residual, qkv_weight, None, (self.gain, 1e-6), place)
        h = self.attention.call(self.index, q)
        linear(h, o, residual=self.residual)
        h = linear(self.residual, gate_up, norm=(self.gain, 1e-6), gated=True)
        linear(h, down, residual=self.residual)


def bench_fp8(model: Model) -> Iterator[Line]:
    """Each product of a layer with a weight of 8-bit floats and what is fused around it, beside a plain weight's."""
    hidden, gain = model.hidden, (random(model.hidden), 1e-6)
    shapes = [("qkv", hidden, model.qkv), ("o", model.heads * model.dim, hidden), ("gate_up", hidden, 2 * model.inner),
              ("down", model.inner, hidden)]  # fmt: skip
    for name, k, n in shapes:
        plain = [random(n, k) for _ in range(copies(n * k, least=4, most=16))]
        packed = [Fp8Channel().pack(weight) for weight in plain]
        for m in (1, 4, 8, 16, 24, 32, 64, 128, 256, 1024, 8192):
            x, y = random(m, k), random(m, n)
            around: dict[str, Any] = {
                "qkv": {"norm": gain}, "o": {"residual": y}, "gate_up": {"norm": gain, "gated": True},
                "down": {"residual": y},
            }[name]  # fmt: skip
            us = microseconds([partial(fp8_linear.linear, x, w["weight"], w["weight_scale"], **around) for w in packed])
            beside = microseconds([partial(linear, x, w, **around) for w in plain])
            yield Line(f"fp8 {name}", model.name, f"{m}x{k}->{n}", us, n * k / us / 1e3, "GB/s", beside)
        del plain, packed


def bench_codes(model: Model) -> Iterator[Line]:
    """The same with the formats of 4 and 8 bits whose columns share scales."""
    hidden, gain = model.hidden, (random(model.hidden), 1e-6)
    shapes = [("qkv", hidden, model.qkv), ("o", model.heads * model.dim, hidden), ("gate_up", hidden, 2 * model.inner),
              ("down", model.inner, hidden)]  # fmt: skip
    for kind, (name, k, n) in product(("int4", "int8", "fp8_block", "mxfp4"), shapes):
        form: WeightFormat = FORMATS.get(kind)()
        plain = [random(n, k) for _ in range(copies(n * k // 2, least=4, most=16))]
        packed = [form.pack(weight) for weight in plain]
        bytes_read = sum(tensor.numel() * tensor.element_size() for tensor in packed[0].values())
        matrices = [form.matrix(tensors, None) for tensors in packed]
        for m in (1, 8, 9, 16, 17, 32, 64, 96, 128, 256, 384, 512, 2048, 8192):
            x, y = random(m, k), random(m, n)
            around: dict[str, Any] = {
                "qkv": {"norm": gain}, "o": {"residual": y}, "gate_up": {"norm": gain, "gated": True},
                "down": {"residual": y},
            }[name]  # fmt: skip
            us = microseconds([partial(matrix.linear, x, **around) for matrix in matrices])
            beside = microseconds([partial(linear, x, w, **around) for w in plain])
            yield Line(f"{kind} {name}", model.name, f"{m}x{k}->{n}", us, bytes_read / us / 1e3, "GB/s", beside)
        del plain, packed, matrices


def bench_layer(model: Model) -> Iterator[Line]:
    shapes = [(model.qkv, model.hidden), (model.hidden, model.heads * model.dim), (2 * model.inner, model.hidden),
              (model.hidden, model.inner)]  # fmt: skip
    weight_bytes = sum(n * k for n, k in shapes) * 2
    weights = [[random(n, k) * 0.02 for n, k in shapes] for _ in range(copies(weight_bytes, least=4))]
    gain, head_gain = random(model.hidden), random(model.dim) if model.qk_norm else None
    table = random(8192, model.dim, dtype=torch.float32)
    for rows, length in [(1, 256), (1, 4096), (8, 256), (16, 256), (64, 256), (256, 1024)]:
        attention = decode_case(model, [length] * rows)
        positions = torch.full((rows,), length - 1, device=DEVICE, dtype=torch.int32)
        residual = random(rows, model.hidden)
        us = microseconds([
            Layer(model, attention, i, w, gain, head_gain, table, positions, residual)
            for i, w in enumerate(weights)
        ])  # fmt: skip
        yield Line("layer", model.name, f"{rows}x{length}", us, (weight_bytes + attention.num_bytes) / us / 1e3, "GB/s")


BACKEND_CASES = [(rows, 1, length) for rows in (1, 8, 64) for length in (1024, 8192, 32768)] + [(1, 4096, 4096)]


def bench_backends(model: Model) -> Iterator[Line]:
    """One step's plan, run by as many layers as it takes to leave the L2 cache; rows, queries each, tokens each."""
    for name in ATTENTION_BACKENDS:
        backend = ATTENTION_BACKENDS.get(name)
        for rows, queries, length in BACKEND_CASES:
            spec, inputs, layers = backend_case(
                model, 256 if name == "flash_attn" else BLOCK_SIZE, rows, queries, length
            )
            if (why := backend.refuses(spec)) is not None:
                print(f"{model.name:13} {name}: {why}")
                break
            used, q = backend(spec), random(rows * queries, model.heads, model.dim)
            plan = used.plan(inputs)
            calls = [partial(used.run, q, layer, plan, model.dim**-0.5) for layer in layers]
            us = microseconds(calls) if used.graph_support else microseconds_eager(calls)
            size = rows * length * model.kv_heads * model.dim * 2 * DTYPE.itemsize
            pairs = rows * queries * (length - (queries - 1) / 2)
            flops = 4 * pairs * model.heads * model.dim
            rate = (flops / us / 1e6, "TFLOP/s") if queries > 1 else (size / us / 1e3, "GB/s")
            yield Line(name, model.name, f"{rows}x{queries}/{length}", us, *rate)
            del used, q, plan, calls, layers
            torch.cuda.empty_cache()


def backend_case(
    model: Model, block_size: int, rows: int, queries: int, length: int
) -> tuple[AttentionSpec, AttentionInputs, list[LayerCache]]:
    blocks, tokens = length // block_size, rows * queries
    spec = AttentionSpec(
        model.heads, model.kv_heads, model.dim, block_size, DTYPE, DTYPE, DEVICE, max_rows=rows, max_tokens=tokens,
        max_seq_len=length,
    )  # fmt: skip
    order = (torch.randperm(rows * blocks, device=DEVICE) + 1).int().view(rows, blocks)
    starts, lengths, seats = [row * queries for row in range(rows + 1)], [length] * rows, list(range(1, rows + 1))

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE, dtype=torch.int32)

    decodes = rows if queries == 1 else 0
    inputs = AttentionInputs(
        num_rows=rows, num_tokens=tokens, num_decodes=decodes, max_query_len=0 if decodes else queries,
        max_seq_len=length, seats=ints(seats), query_start=ints(starts), seq_lens=ints(lengths),
        block_table=torch.cat([torch.zeros_like(order[:1]), order]), seats_host=seats, query_start_host=starts,
        seq_lens_host=lengths,
    )  # fmt: skip
    shape = (rows * blocks + 1, model.kv_heads, block_size, model.dim)
    count = copies(rows * length * model.kv_heads * model.dim * 4, least=2, most=32)
    return spec, inputs, [LayerCache(random(*shape), random(*shape)) for _ in range(count)]


def microseconds_eager(calls: list[Callable[[], object]], rounds: int = 10) -> float:
    """`microseconds` of calls that are launched from Python one after another."""
    times = []
    for _ in range(rounds + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[1:])


LATENT_CASES = [*itertools.product((1, 8, 64), (1024, 8192, 32768)), (256, 1024)]
RANK, ROPE = 512, 64


def bench_latent(model: Model) -> Iterator[Line]:
    """Decode and prompts over latent rows of DeepSeek's widths, for the numbers of heads that ranks of its models have.
    Beside the time of a decode stands the floor: latent rows once at the rate of copies, or the products at the rate of
    large ones."""
    if model is not MODELS[0]:  # the shapes are no model's here
        return
    for heads, (rows, length) in itertools.product((16, 32, 64, 128), LATENT_CASES):
        row_bytes = rows * length * (RANK + ROPE) * DTYPE.itemsize
        blocks = length // BLOCK_SIZE
        order = (torch.randperm(rows * blocks, device=DEVICE) + 1).int().view(rows, blocks)
        table = torch.cat([torch.zeros_like(order[:1]), order])
        shape = (rows * blocks + 1, 1, BLOCK_SIZE, RANK + ROPE)
        caches = [random(*shape) for _ in range(copies(row_bytes, least=2, most=32))]
        seats = torch.arange(1, rows + 1, device=DEVICE, dtype=torch.int32)
        lengths = torch.full((rows,), length, device=DEVICE, dtype=torch.int32)
        q, workspace = random(rows, heads, RANK + ROPE), latent_paged.decode_workspace(rows, heads, RANK, ROPE, DEVICE)
        cached = LatentRows(RANK, ROPE, BLOCK_SIZE, DTYPE)
        plan = latent_paged.decode_schedule(seats, lengths, heads, cached)
        calls = [partial(latent_paged.decode, q, cache, RANK, table, plan, 0.07, workspace) for cache in caches]
        copies_at, products_at = chip.at_hand() or chip.H200
        flops = 2 * heads * (2 * RANK + ROPE) * rows * length
        us, floor = microseconds(calls), max(row_bytes / copies_at, flops / products_at) * 1e6
        yield Line("latent decode", f"{heads} heads", f"{rows}x{length}", us, row_bytes / us / 1e3, "GB/s", floor)
        del caches, calls
        torch.cuda.empty_cache()
    for heads, (queries, length) in itertools.product((16, 128), LATENT_PROMPTS):
        yield from latent_prompt(heads, queries, length)


LATENT_PROMPTS = [(256, 256), (1024, 1024), (4096, 4096), (128, 8192), (512, 8192), (1024, 16384)]
HEAD = latent_expanded.HeadDims(128, 128)


def latent_prompt(heads: int, queries: int, length: int) -> Iterator[Line]:
    """From queries that were turned to heads' values, as a layer of DeepSeek's widths does it in either form. Beside
    the time of each stands the floor, its operations at the rate that was measured for products."""
    blocks = length // BLOCK_SIZE
    order = (torch.randperm(blocks, device=DEVICE) + 1).int()
    table = torch.stack([torch.zeros_like(order), order])
    (seat, size), starts = torch.tensor([[1], [length]], device=DEVICE, dtype=torch.int32), [0, queries]
    starts = torch.tensor(starts, device=DEVICE, dtype=torch.int32)
    weight = random(heads, sum(HEAD), RANK) * RANK**-0.5
    keys, values = weight.split(list(HEAD), 1)
    row_bytes, query_bytes = length * (RANK + ROPE) * 2, queries * heads * (HEAD.nope + ROPE) * 2
    inputs = [
        (random(queries, heads, HEAD.nope + ROPE), random(blocks + 1, 1, BLOCK_SIZE, RANK + ROPE))
        for _ in range(copies(row_bytes + query_bytes, least=2))
    ]

    def absorbed(q: torch.Tensor, cache: torch.Tensor) -> None:
        absorbing = q.new_empty(queries, heads, RANK + ROPE)
        by_head(q[..., : HEAD.nope], keys, absorbing[..., :RANK])
        absorbing[..., RANK:] = q[..., HEAD.nope :]
        rows = latent_paged.prefill(absorbing, cache, RANK, table, seat, starts, size, queries, 0.07)
        by_head(rows.view(queries, heads, RANK), values.transpose(1, 2))

    work = latent_expanded.PromptWork(length, queries * (2 * length - queries + 1) // 2)
    room = latent_expanded.workspace(heads, RANK + ROPE, HEAD, length, DTYPE, DEVICE)
    plan = latent_expanded.schedule(
        seat, starts, size, length, queries, queries, heads, RANK + ROPE, HEAD, room.numel()
    )  # fmt: skip
    out = torch.empty(queries, heads * HEAD.value, device=DEVICE, dtype=DTYPE)

    def expanded(q: torch.Tensor, cache: torch.Tensor) -> None:
        assert plan is not None
        latent_expanded.attend(q, cache, weight, table, plan, 0.07, room, out)

    costs = latent_expanded.costs(queries, 1, heads, DEVICE)
    pays = latent_expanded.pays(work, queries, RANK, ROPE, HEAD, costs)
    for name, call, columns, made in (
        ("absorbed", absorbed, 2 * RANK + ROPE, queries), ("expanded", expanded, sum(HEAD) + ROPE, length)
    ):  # fmt: skip
        flops = 2 * heads * (columns * work.pairs + sum(HEAD) * RANK * made)
        us = microseconds([partial(call, *each) for each in inputs[: 4 if length > 4096 else None]])
        chosen = "*" if pays == (name == "expanded") else ""
        floor = flops / (chip.at_hand() or chip.H200).matmul_flops * 1e6
        yield Line(
            f"latent {name}{chosen}", f"{heads} heads", f"{queries}/{length}", us, flops / us / 1e6, "TFLOP/s", floor
        )


BENCHES = {"small": bench_small, "decode": bench_decode, "prefill": bench_prefill, "linear": bench_linear,
           "in-parts": bench_in_parts, "batch": bench_batch, "wide": bench_wide, "qkv": bench_qkv, "layer": bench_layer,
           "fp8": bench_fp8, "codes": bench_codes, "backends": bench_backends, "latent": bench_latent}  # fmt: skip


def show(line: Line) -> None:
    rate = f"{line.rate:8.0f} {line.unit:8}"
    beside = "" if line.library_us is None else f"{line.library_us:9.1f} {line.library_us / line.us:5.2f}x"
    print(f"{line.model:13} {line.kernel:19} {line.shape:18} {line.us:9.1f} {rate}{beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(BENCHES), help="comma-separated: " + ", ".join(BENCHES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {DTYPE}, block size {BLOCK_SIZE}")
    print(f"{'model':13} {'kernel':19} {'shape':18} {'µs':>9} {'rate':>8} {'':8}{'library µs':>9}")
    lines = []
    for name in arguments.only.split(","):
        for model in MODELS:
            for line in BENCHES[name](model):
                show(line)
                lines.append(line)
            torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))


if __name__ == "__main__":
    main()
