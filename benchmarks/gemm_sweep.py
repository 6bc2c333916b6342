"""Ways to cut the products of decode steps up, each in a chain of whole layers: what `gemm_plan` was fitted to.

    python -m benchmarks.gemm_sweep [--models qwen3-4b …] [--rows 1 8 16 32 64 128] [--fp8] [--ranks 1]
                                    [--out FOLDER]

All products of a layer are as planned but one, which is tried in every way; the best is kept for the products after it.
Times are of a layer (256 tokens a row), microseconds. Kernels are compiled by threads before they are timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import kernels, results_file, workloads
from benchmarks.results_file import Row
from quire.kernels.attention import rope
from quire.kernels.gemm import fp8_linear
from quire.kernels.gemm.linear import linear
from quire.kernels.gemm.triton import decode_gemm
from quire.kernels.gemm.triton import plan as gemm_plan
from quire.kernels.gemm.triton.plan import Ahead, Plan, Registers, Ring, Shared, Tiles, Vector
from quire.kernels.triton.rehearsal import Rehearsal
from quire.quantization.fp8 import Fp8Channel


class Products:
    """The four products of a layer, outputs and K, and how to run one by a plan."""

    def __init__(self, model: kernels.Model, fp8: bool = False) -> None:
        self.fp8 = fp8
        hidden, inner = model.hidden, model.inner
        self.sizes = {
            "gate_up": (inner, hidden), "down": (hidden, inner), "qkv": (model.qkv, hidden),
            "o": (hidden, model.heads * model.dim),
        }  # fmt: skip
        self.gain = (kernels.random(hidden) * 0.1 + 1, 1e-6)

    def plan(self, name: str, rows: int) -> Plan | None:
        n, k = self.sizes[name]
        gated, residual = name == "gate_up", name in ("down", "o")
        if self.fp8:
            return gemm_plan.plan_8_bits(rows, n, k, gated=gated, residual=residual, bulk=True, ring=True)
        return gemm_plan.plan(rows, n, k, gated=gated, residual=residual, bulk=True, ahead=not residual)

    def run(
        self,
        name: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor,
        how: Plan | None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """How: None is the library. scale: of each line of a weight of 8 bits."""
        gated, added = name == "gate_up", name in ("down", "o")
        norm = None if added else self.gain
        if how is None:
            after = residual if added else None
            if scale is None:
                return linear(x, weight, norm=norm, gated=gated, residual=after)
            y = fp8_linear.by_library(x, weight, scale, norm=norm, gated=gated, residual=after)
            assert isinstance(y, torch.Tensor)
            return y
        out = residual if added else torch.empty((len(x), self.sizes[name][0]), dtype=x.dtype, device=x.device)
        return decode_gemm.linear(x, weight, None, norm, gated, added, out, how, scale)

    def ways(self, name: str, rows: int) -> Iterator[Plan]:
        (n, k), gated = self.sizes[name], name == "gate_up"
        if rows == 1:
            for apart in (False, True) if name in ("gate_up", "qkv") else (False,):
                for outputs, width, warps in ((1, 2048, 4), (2, 1024, 4), (2, 2048, 4), (4, 512, 4), (4, 1024, 4),
                                              (4, 2048, 4), (4, 2048, 8), (8, 512, 4)):  # fmt: skip
                    if outputs * width <= (4096 if gated else 8192):
                        yield Vector(outputs, width, warps, apart)
        if rows <= 16 and k <= 5120:
            for cut in ((16, 128, 1, 8), (16, 128, 2, 8), (16, 128, 2, 4), (16, 64, 4, 4), (32, 128, 1, 8)):
                yield Registers(*cut)
        if 1 < rows <= 16:
            for cut in ((16, 64, 4, 4), (16, 128, 3, 4), (16, 256, 2, 4), (32, 64, 4, 4)):
                yield Shared(*cut)
        if rows > 1:
            yield from self._tiles(n, k, max(8, rows), gated)
        if rows > 16 and name in ("gate_up", "qkv"):
            yield from (Ahead(32), Ahead(64))

    def ways_8_bits(self, name: str, rows: int) -> Iterator[Plan | None]:
        (n, k), gated = self.sizes[name], name == "gate_up"
        if rows <= 16:
            yield from self._rings(name, rows)
        if rows == 1:
            for apart in (False, True) if name in ("gate_up", "qkv") else (False,):
                for outputs, width, warps in ((1, 2048, 4), (1, 4096, 4), (1, 4096, 8), (2, 1024, 4), (2, 2048, 4),
                                              (2, 4096, 8), (4, 1024, 4), (4, 2048, 4), (4, 2048, 8), (8, 1024, 4),
                                              (8, 512, 4)):  # fmt: skip
                    if k // width <= 32:
                        yield Vector(outputs, width, warps, apart)
        if rows <= 16 and k <= 5120:
            for cut in ((16, 128, 2, 8), (16, 128, 4, 8), (16, 128, 4, 4), (16, 128, 8, 4), (32, 128, 2, 8)):
                yield Registers(*cut)
        if rows <= 16:
            for cut in ((16, 128, 3, 4), (16, 128, 5, 4), (16, 256, 2, 4), (16, 256, 3, 4), (32, 128, 3, 4),
                        (32, 128, 4, 4), (32, 256, 2, 4), (16, 128, 3, 8)):  # fmt: skip
                yield Shared(*cut)
        yield from self._tiles(n, k, max(8, rows), gated, 1)
        if rows > 1:
            yield None

    def _rings(self, name: str, rows: int) -> Iterator[Ring]:
        steps, height = -(-self.sizes[name][1] // gemm_plan.RING_COLUMNS), 1 if rows == 1 else 8 if rows <= 8 else 16
        for programs, stages in ((1, 5), (1, 8), (1, 9), (1, 11), (2, 3), (2, 4), (2, 6)):
            for split in (1, 2, 4) if rows > 1 and name in ("down", "o") else (1,):
                kept = height * -(-steps // split) * gemm_plan.RING_COLUMNS * 2 + gemm_plan.RING_SUMS
                if programs * (stages * gemm_plan.RING_STEP + kept) <= gemm_plan.SHARED_BYTES:
                    for flight, early in ((2, False), (3, True), (stages, True)):
                        yield Ring(stages, flight, programs, split, early)

    def _tiles(self, n: int, k: int, rows: int, gated: bool, width: int = 2) -> Iterator[Tiles]:
        """width: bytes of an element."""
        for block_n, block_k in ((16, 128), (32, 128), (32, 512), (64, 64), (64, 128), (64, 256), (128, 128)):
            stage = (rows + (2 * block_n if gated else block_n)) * block_k * width
            for programs in (1, 2, 3):
                stages = min(gemm_plan.SHARED_BYTES // programs // stage, 8)
                tiles = -(-n // block_n)
                for split in {1, min(programs * gemm_plan.PROCESSORS // tiles, 8)} - {0}:
                    tall = width == 1 or rows <= 32 or (rows == 64 and block_n >= 64)
                    if stages >= 2 and k // block_k // split >= 3 and 2 * block_n * rows <= 16384:
                        yield Tiles(rows, block_n, block_k, split, 4, stages, tall, 256)


def sweep(model: kernels.Model, rows: int, fp8: bool) -> Iterator[Row]:
    products = Products(model, fp8)
    layer_bytes = (1 if fp8 else 2) * sum(
        n * k * (2 if name == "gate_up" else 1) for name, (n, k) in products.sizes.items()
    )
    weights = [
        {name: kernels.random(n * (2 if name == "gate_up" else 1), k) * 0.02 for name, (n, k) in products.sizes.items()}
        for _ in range(kernels.copies(layer_bytes, least=3, most=10))
    ]
    scales: list[dict[str, torch.Tensor | None]] = [dict.fromkeys(layer) for layer in weights]
    if fp8:
        packed = [{name: Fp8Channel().pack(weight) for name, weight in layer.items()} for layer in weights]
        weights = [{name: tensors["weight"] for name, tensors in layer.items()} for layer in packed]
        scales = [{name: tensors["weight_scale"] for name, tensors in layer.items()} for layer in packed]
    attention = kernels.decode_case(model, [256] * rows)
    positions = torch.full((rows,), 255, device=kernels.DEVICE, dtype=torch.int32)
    gain = kernels.random(model.dim) if model.qk_norm else None
    table = kernels.random(256, model.dim, dtype=torch.float32)
    cache = attention.cache
    place = rope.QkvTarget(
        table, positions, positions, cache.k, cache.v, model.heads, model.kv_heads, model.dim, gain, gain
    )
    residual = kernels.random(rows, model.hidden)
    chosen = {name: products.plan(name, rows) for name in products.sizes}

    def layer(index: int, plans: dict[str, Plan | None]) -> None:
        def product(name: str, x: torch.Tensor) -> torch.Tensor:
            return products.run(name, x, weights[index][name], residual, plans[name], scales[index][name])

        heads = attention.call(index, rope.qk_norm_rope_write(product("qkv", residual), *place))
        product("o", heads)
        product("down", product("gate_up", residual))

    for name in products.sizes:
        ways = list(dict.fromkeys([chosen[name], *(products.ways_8_bits if fp8 else products.ways)(name, rows)]))
        rehearsal = Rehearsal()
        with rehearsal:
            for how in ways:
                layer(0, {**chosen, name: how})
        rehearsal.wait()
        times = {}
        for how in ways:
            calls: list[Callable[[], object]] = [
                partial(layer, index, {**chosen, name: how}) for index in range(len(weights))
            ]
            times[how] = kernels.microseconds(calls)
            yield Row(
                name,
                model.name + ("+fp8" if fp8 else ""),
                f"rows={rows}",
                str(how or "library"),
                round(times[how], 2),
                "us",
            )
        chosen[name] = min(times, key=lambda how: times[how])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-3.2-1b", "qwen3-4b", "llama-3.1-8b", "qwen3-14b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--fp8", action="store_true", help="weights of 8-bit floats")
    parser.add_argument("--ranks", type=int, default=1, help="that share a layer: the products are those of one")
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    args = parser.parse_args()
    found: list[Row] = []
    for name in args.models:
        c, ranks = workloads.MODELS[name], args.ranks
        model = kernels.Model(
            name if ranks == 1 else f"{name} tp={ranks}", c["hidden_size"], c["num_attention_heads"] // ranks,
            c["num_key_value_heads"] // ranks, c["head_dim"], c["intermediate_size"] // ranks, c["vocab_size"],
            c["model_type"] == "qwen3",
        )  # fmt: skip
        for rows in args.rows:
            for row in sweep(model, rows, args.fp8):
                found.append(row)
                print(f"{row.model:20}{row.case:10}{row.test:8}{row.value:8.1f} {row.metric}", flush=True)
            torch.cuda.empty_cache()
    command = " ".join(["python -m benchmarks.gemm_sweep", *sys.argv[1:]])
    print(results_file.write(found, torch.cuda.get_device_name(), command, {}, args.out, "gemm-sweep"))


if __name__ == "__main__":
    main()
