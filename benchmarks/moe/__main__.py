"""Each kernel of a mixture of experts: microseconds, and its share of the memory's rate or of the matrix units'.

    python -m benchmarks.moe --model qwen3-30b-a3b --rows 1 2 8 32 64 256 1024 4096
    python -m benchmarks.moe --model qwen3-30b-a3b+fp8 --ranks 2
    python -m benchmarks.moe --model gpt-oss-20b+mxfp4 --rows 1 8 64 256 4096
    python -m benchmarks.moe --model qwen3-30b-a3b --rows 8 64 --sweep

First the whole is compared with plain torch. Then chains of calls are timed in graphs, over so many layers' weights
that the L2 cache holds none, with choices as even as random ones are. Bytes are the least that must move; ceilings are
the measured ones of benchmarks/chip.py. +fp8: weights of 8 bits; of other formats
(+int4, +mxfp4, +fp8_block …) it is the experts' products alone, beside those of experts widened. --ranks: as the first
of so many sees it that have experts whole. --sweep: other ways to cut the products up, the fastest first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks import chip, workloads
from benchmarks.kernels import microseconds
from benchmarks.moe import coded
from quire.distributed.topology import Topology
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm.fp8_linear import E4M3, Fp8Rows, rms_norm_both
from quire.kernels.gemm.triton.pipeline_sm90 import BLOCK_M
from quire.kernels.moe.experts import add_each, norms_inside
from quire.kernels.moe.inside import USUAL
from quire.kernels.moe.router import router_logits
from quire.kernels.moe.routing import Routes, Rule, route_reference
from quire.kernels.moe.triton import direct, routing
from quire.kernels.moe.triton.experts import add_experts
from quire.kernels.moe.triton.grouped import GroupedInside, combine, grouped
from quire.kernels.moe.triton.plan import Direct, Plan, Tiles, apart, plan
from quire.kernels.triton.launch import has_gluon_sm90
from quire.layers.spread import Spread
from quire.quantization.fp8 import Fp8Channel

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
COPY_BYTES_PER_S, MATMUL_FLOPS = chip.at_hand() or chip.H200
PAST_L2 = 256 * 2**20


@dataclass(frozen=True)
class Line:
    rows: int
    kernel: str
    us: float
    mbytes: float
    of_memory: float  # share of the measured copy rate
    of_matrix: float  # share of the measured rate of products
    floor_us: float


@dataclass
class Layer:
    gate_up: torch.Tensor
    down: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None
    router: torch.Tensor
    logits: torch.Tensor
    routes: Routes

    def of_gate_up(self) -> torch.Tensor | None:
        return None if self.scales is None else self.scales[0]

    def of_down(self) -> torch.Tensor | None:
        return None if self.scales is None else self.scales[1]


class Setting:
    """A model's sizes, some layers' weights, and the choices of `rows` tokens in each; of the first of `ranks`."""

    def __init__(self, model: str, rows: int, ranks: int) -> None:
        sparse = workloads.experts_of(model)
        if sparse is None:
            raise SystemExit(f"{model} has no experts")
        self.experts, self.top_k, self.inner = sparse
        self.hidden, self.rows = workloads.config_of(model)["hidden_size"], rows
        self.rule = Rule(self.experts, self.top_k, renormalize=True)
        self.narrow = workloads.quantization_of(model) == "fp8"
        self.width = 1 if self.narrow else 2
        self.own = -(-self.experts // ranks)
        self.here = Spread(self.experts, Topology(0, ranks, True), 0, DEVICE).here if ranks > 1 else None
        self.x = torch.randn(rows, self.hidden, device=DEVICE, dtype=DTYPE)
        self.x_narrow = Fp8Rows(self.x.to(E4M3), torch.ones(rows, device=DEVICE)) if self.narrow else None
        self.residual = torch.randn(rows, self.hidden, device=DEVICE, dtype=DTYPE)
        self.norm = torch.ones(self.hidden, device=DEVICE, dtype=DTYPE)
        one = 3 * self.inner * self.hidden * self.width
        hit = workloads.experts_hit(self.experts, self.top_k, rows) / ranks
        count = min(max(PAST_L2 // int(one * hit) + 1, 2), 16)
        room = int(50e9) // (one * self.own)
        self.layers = [self._layer() for _ in range(max(min(count, room), 1))]

    def _layer(self) -> Layer:
        gate_up, first = self._weights(self.own, 2 * self.inner, self.hidden)
        down, second = self._weights(self.own, self.hidden, self.inner)
        scales = None if first is None or second is None else (first, second)
        router = self._random(self.experts, self.hidden)
        logits = torch.randn(self.rows, self.experts, device=DEVICE)
        return Layer(gate_up, down, scales, router, logits, routing.route(logits, self.rule, None, None, self.here))

    def _weights(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.narrow:
            return self._random(*shape), None
        packed = [Fp8Channel().pack(self._random(*shape[1:])) for _ in range(shape[0])]
        return torch.stack([one["weight"] for one in packed]), torch.stack([one["weight_scale"] for one in packed])

    def _random(self, *shape: int) -> torch.Tensor:
        bound = (3 / shape[-1]) ** 0.5
        return torch.empty(shape, device=DEVICE, dtype=DTYPE).uniform_(-bound, bound)

    def hit(self) -> float:
        """Experts, in the mean of the layers."""
        found = [layer.routes.experts for layer in self.layers]
        return sum(len(experts[experts >= 0].unique()) for experts in found) / len(found)

    def tiled(self, rows: int) -> list[Layer]:
        """The layers, their choices ordered in tiles of other heights."""
        return [
            replace(layer, routes=routing.route(layer.logits, self.rule, None, None, self.here, rows))
            for layer in self.layers
        ]


def check(setting: Setting) -> float:
    """The whole against plain torch with float32 sums; relative error."""
    layer = setting.layers[0]
    few = torch.arange(0, setting.rows, max(setting.rows // 64, 1), device=DEVICE)
    zeros = torch.zeros_like(setting.residual)
    ours = add_experts(setting.x, layer.routes, layer.gate_up, layer.down, zeros, layer.scales)[few].float()
    some = Routes(layer.routes.experts[few], layer.routes.weights[few])
    wide = torch.zeros(len(few), setting.hidden, device=DEVICE)

    def dense(weights: torch.Tensor, scale: torch.Tensor | None) -> Callable[[int], torch.Tensor]:
        return lambda e: weights[e].float() if scale is None else weights[e].float() * scale[e, :, None]

    first, second = dense(layer.gate_up, layer.of_gate_up()), dense(layer.down, layer.of_down())
    exact = add_each(setting.x[few].float(), some, first, second, wide)
    error = ((ours - exact).norm() / exact.norm()).item()
    if not error <= (6e-2 if setting.narrow else 1e-2):  # x goes to 8 bits too
        raise SystemExit(f"{setting.rows} rows: the kernels are wrong: relative error {error:.2e}")
    logits = torch.randn(setting.rows, setting.experts, device=DEVICE)
    ours_chosen = routing.route(logits, setting.rule, None, None).experts.sort(-1).values
    if not torch.equal(ours_chosen, route_reference(logits, setting.rule).experts.sort(-1).values):
        raise SystemExit(f"{setting.rows} rows: other experts are chosen than by plain torch")
    return error


def line(setting: Setting, kernel: str, us: float, num_bytes: float, flops: float) -> Line:
    floor = max(num_bytes / COPY_BYTES_PER_S, flops / MATMUL_FLOPS) * 1e6
    return Line(
        setting.rows, kernel, round(us, 2), round(num_bytes / 1e6, 2),
        round(num_bytes / us * 1e6 / COPY_BYTES_PER_S, 3), round(flops / us * 1e6 / MATMUL_FLOPS, 3), round(floor, 2),
    )  # fmt: skip


def timed(setting: Setting, call: Callable[[Layer], object], layers: list[Layer] | None = None) -> float:
    return microseconds([partial(call, layer) for layer in layers or setting.layers])


def lines(setting: Setting) -> Iterator[Line]:
    s, (rows, top_k, hidden, inner) = setting, (setting.rows, setting.top_k, setting.hidden, setting.inner)
    choices, hit = rows * top_k, setting.hit()
    stream, lists, choices = rows * hidden * 2, choices * 8, choices * s.own // s.experts
    yield line(s, "norm", timed(s, lambda _: _normed(s)), 2 * stream, 0)
    router = timed(s, lambda layer: router_logits(s.x, layer.router))
    yield line(s, "router", router, (rows + s.experts) * hidden * 2, 2 * rows * s.experts * hidden)
    logits = torch.randn(rows, s.experts, device=DEVICE)
    chosen = timed(s, lambda _: routing.route(logits, s.rule, None, None, s.here))
    yield line(s, "choice", chosen, rows * s.experts * 4 + lists, 0)
    how, weights = plan(rows, top_k, s.experts, s.width), hit * hidden * inner * s.width
    if not how.direct:
        (middle, units), parts = _middle(s), torch.randn(rows * top_k, hidden, device=DEVICE, dtype=DTYPE)
        yield line(s, f"gate_up {how.gate_up}", timed(s, partial(_gate_up, s, middle, units, how)),
                   2 * weights + (stream / 2 + choices * inner) * s.width, 4 * choices * hidden * inner)  # fmt: skip
        yield line(s, f"down {how.down}", timed(s, partial(_down, s, middle, units, parts, how)),
                   weights + choices * (inner * s.width + hidden * 2), 2 * choices * hidden * inner)  # fmt: skip
        if how.gate_up.rows == BLOCK_M and has_gluon_sm90(DEVICE) and not s.narrow:
            yield line(s, "down sm90", timed(s, partial(_wide_down, middle, parts)),
                       weights + choices * (inner + hidden) * 2, 2 * choices * hidden * inner)  # fmt: skip
        sums = timed(s, lambda layer: combine(parts, layer.routes.experts, s.residual))
        yield line(s, "combine", sums, choices * hidden * 2 + 2 * stream, 0)
    whole = timed(s, lambda layer: add_experts(s.x, layer.routes, layer.gate_up, layer.down, s.residual, layer.scales))
    yield line(s, "experts", whole, 3 * weights + 3 * stream, 6 * choices * hidden * inner)
    yield line(s, "all", timed(s, partial(_all, s)), 3 * weights + 3 * stream, 6 * choices * hidden * inner)


def _normed(s: Setting) -> tuple[torch.Tensor, Fp8Rows | None]:
    """As the products want it."""
    return rms_norm_both(s.residual, s.norm, 1e-6) if s.narrow else (rms_norm(s.residual, s.norm, 1e-6), None)


def _middle(s: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """What gate and up have made, and room for scales of it."""
    choices = s.rows * s.top_k
    made = torch.randn(choices, s.inner, device=DEVICE, dtype=DTYPE)
    return made.to(E4M3) if s.narrow else made, torch.ones(choices, s.inner, device=DEVICE)


def _gate_up(s: Setting, out: torch.Tensor, units: torch.Tensor, how: Plan, layer: Layer) -> None:
    """units: of 8 bits, the scales of what it makes."""
    tiling, x, inside = layer.routes.tiling, s.x, GroupedInside()
    assert tiling is not None
    if s.x_narrow is not None:
        x, inside = s.x_narrow.values, GroupedInside(x_scale=s.x_narrow.scale, out_scale=units)
    grouped(x, layer.gate_up, layer.of_gate_up(), None, out, tiling, s.top_k, inside, how.gate_up, bulk=True)


def _down(s: Setting, x: torch.Tensor, units: torch.Tensor, out: torch.Tensor, how: Plan, layer: Layer) -> None:
    tiling, weights = layer.routes.tiling, layer.routes.weights
    assert tiling is not None
    inside = GroupedInside(x_scale=units, unit=how.gate_up.block_n) if s.narrow else GroupedInside()
    grouped(x, layer.down, layer.of_down(), weights, out, tiling, s.top_k, inside, how.down, bulk=True)


def _wide_down(x: torch.Tensor, out: torch.Tensor, layer: Layer) -> None:
    """The same in Gluon."""
    from quire.kernels.moe.triton import grouped_sm90

    tiling = layer.routes.tiling
    assert tiling is not None
    grouped_sm90.down(x, layer.down, None, layer.routes.weights, out, tiling)


def _all(s: Setting, layer: Layer) -> None:
    x, norm = s.residual, (s.norm, 1e-6)
    inside: tuple[torch.Tensor, float] | None = norm
    narrow: Fp8Rows | None = None
    if not norms_inside(x, s.rule):
        (x, narrow), inside = _normed(s), None
    routes = routing.route(router_logits(x, layer.router, inside), s.rule, None, None, s.here)
    residual = s.residual if s.here is None else None
    add_experts(x, routes, layer.gate_up, layer.down, residual, layer.scales, inside, narrow=narrow)


def sweep(setting: Setting) -> Iterator[tuple[float, str]]:
    """Other configurations than the plan's, each product by itself."""
    s, rows = setting, setting.rows
    how, choices = plan(rows, s.top_k, s.experts, s.width), rows * s.top_k
    if rows <= 8:
        usual = apart(s.hidden, s.inner, s.top_k)
        gates = [
            replace(usual, outputs=n, columns=k, warps=w)
            for n, k, w in product((1, 2, 4), (512, 1024, 2048), (2, 4, 8))
        ]
        downs = [replace(usual, down_outputs=n, down_columns=k, down_warps=w)
                 for n, k, w in product((2, 4, 8), (128, 256, 512), (2, 4, 8))]  # fmt: skip
        for config in dict.fromkeys(gates + downs):
            call = partial(_direct, s, config)
            yield from _try(s, f"direct {config}", call, s.layers)
    (middle, units), parts = _middle(s), torch.randn(choices, s.hidden, device=DEVICE, dtype=DTYPE)
    for height in (16, 32, 64, 128) if choices > s.experts else (16,):
        if not 0.25 <= height / max(how.gate_up.rows, 1) <= 4:
            continue
        layers = s.tiled(height)
        tall = height <= 64
        for wide, block_n, block_k, stages, warps in product((False, True), (32, 64, 128, 256), (64, 128, 256),
                                                             (2, 3, 4, 5, 6), (4, 8)):  # fmt: skip
            lines_ = block_n * (1 if wide else 2)
            stage = (height + lines_) * block_k * s.width
            if (
                not 40 * 1024 <= stages * stage <= 226 * 1024
                or lines_ * height > 1 << 15
                or (tall and block_n < 16 * warps)
                or (wide and s.narrow and block_k % how.gate_up.block_n)
            ):
                continue
            config = Tiles(height, block_n, block_k, stages, warps, tall)
            one = replace(how, **{"down" if wide else "gate_up": config})
            call = partial(_down, s, middle, units, parts, one)
            if not wide:
                call = partial(_gate_up, s, middle, units, one)
            yield from _try(s, f"{'down' if wide else 'gate_up'} {config}", call, layers)


def _direct(s: Setting, config: Direct, layer: Layer) -> None:
    routes = layer.routes
    direct.add_experts(
        s.x, routes.experts, routes.weights, layer.gate_up, layer.down, s.residual, layer.scales, None, USUAL, config
    )


def _try(s: Setting, name: str, call: Callable[[Layer], object], layers: list[Layer]) -> Iterator[tuple[float, str]]:
    try:
        yield timed(s, call, layers), name
    except Exception as error:  # one that does not fit
        print(f"{name}: {type(error).__name__}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sparse = [model for model in workloads.MODELS if workloads.experts_of(model)]
    known = [model if one is None else f"{model}+{one}" for model in sparse for one in workloads.BYTES]
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=known)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 8, 32, 64, 256, 1024, 4096])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    found: list[dict[str, object]] = []
    if workloads.quantization_of(args.model) not in (None, "fp8"):
        with torch.inference_mode():
            setting_in_codes = coded.Coded(args.model)
            for rows in args.rows:
                for one_line in coded.lines(setting_in_codes, rows):
                    print(one_line, flush=True)
        return
    with torch.inference_mode():
        for rows in args.rows:
            setting = Setting(args.model, rows, args.ranks)
            print(f"{args.model}, {rows} rows: {setting.hit():.1f} experts hit, {len(setting.layers)} layers, "
                  f"relative error {check(setting):.1e}", flush=True)  # fmt: skip
            if args.sweep:
                ranked = sorted(sweep(setting))
                for kind in ("direct", "gate_up", "down"):
                    for us, name in [one for one in ranked if one[1].startswith(kind)][:8]:
                        print(f"  {us:9.2f} us  {name}", flush=True)
                continue
            for one in lines(setting):
                found.append(asdict(one))
                print(f"  {one.us:9.2f} us (floor {one.floor_us:8.2f}) {one.mbytes:9.2f} MB "
                      f"{one.of_memory:6.1%} of memory {one.of_matrix:6.1%} of matrix  {one.kernel}")  # fmt: skip
            del setting
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
