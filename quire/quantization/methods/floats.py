"""Matrices that checkpoints have in floats of 8 or 4 bits: a scale for a tensor, an output, or a block."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.kernels.gemm.fp8_linear import E4M3
from quire.quantization.base import INPUTS, OUTPUTS, Axis, MatrixInfo, Scheme, Source, Tensors
from quire.quantization.fp8 import Fp8Channel
from quire.quantization.grouped import Grouped

SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
# Scales of what is kept of keys and values, and of activations, which are rounded by row where they are at all.
UNUSED = (
    r"\.(input_scale|activation_scale|[kv]_cache\.scale|[kvq]_scale|prob_scale|kv_scale|[kv]_proj\.output_scale|"
    r"(k|v|q|prob)_zero_point)$"
)
WEIGHT = Source("weight", (OUTPUTS, INPUTS), (E4M3,), E4M3)


def per_tensor(info: MatrixInfo, name: str = "weight_scale") -> Scheme:
    """One scale a module."""

    def pack(read: Tensors) -> Tensors:
        rows = torch.tensor(info.parts, device=read[name].device)
        return {"weight": read["weight"], "weight_scale": read[name].view(-1).repeat_interleave(rows)}

    return Scheme(Fp8Channel(), (WEIGHT, Source(name, (), SCALES, torch.float32)), pack)


def per_channel(name: str = "weight_scale", more: tuple[int, ...] = (1,)) -> Scheme:
    """One an output. more: dimensions of length 1 behind."""

    def pack(read: Tensors) -> Tensors:
        return {"weight": read["weight"], "weight_scale": read[name].flatten()}

    return Scheme(Fp8Channel(), (WEIGHT, Source(name, (OUTPUTS, *more), SCALES, torch.float32)), pack)


def per_block(info: MatrixInfo, rows: int, columns: int, name: str, *, spread: bool = False) -> Scheme:
    """One for a block of rows and columns. spread: its axes have one of length 1 behind each.

    A module's are read for all of its rows: parts and ranks' shares of them may begin inside a block.
    """
    form = Grouped("e4m3", columns, scale=torch.float32)
    sources, blocks = [WEIGHT], [info.own_lines(number) // rows for number in range(len(info.modules))]
    for number, lines in enumerate(info.whole):
        axes: tuple[Axis | int, ...] = (-(-lines // rows), Axis("inputs", columns))
        if info.first_with(number) == number:
            axes = (axes[0], 1, axes[1], 1) if spread else axes
            sources.append(Source(name, axes, SCALES, torch.float32, part=number))

    def pack(read: Tensors) -> Tensors:
        """A scale for each row; those that a rank has beside its own are nothing."""
        by_row, groups = [], -(-read["weight"].shape[1] // columns)
        for number, room in enumerate(info.parts):
            scale = read[f"{info.first_with(number)}.{name}"].view(-1, groups)
            own = scale[blocks[number].to(scale.device)]
            by_row.append(torch.nn.functional.pad(own, (0, 0, 0, room - len(own))))
        return {"codes": read["weight"], "scale": torch.cat(by_row)}

    return Scheme(form, tuple(sources), pack)


def micro_scaled(name: str = "weight_scale") -> Scheme:
    """MXFP8: a power of two for each 32 inputs."""
    form = Grouped("e4m3", 32, scale=torch.uint8)
    exponents = Source(name, (OUTPUTS, Axis("inputs", 32)), (torch.uint8,), torch.uint8)
    return Scheme(form, (WEIGHT, exponents), lambda read: {"codes": read["weight"], "scale": read[name]})


# -- 4 bits -----------------------------------------------------------------------------------------------------


def nvfp4(info: MatrixInfo, names: Mapping[str, str], *, inverse: bool) -> Scheme:
    """names: of weight, scale and factor. inverse: the factor is one to divide by."""
    form = Grouped("e2m1", 16, scale=E4M3, outer=True)
    sources = (
        Source(names["weight"], (OUTPUTS, Axis("inputs", 2)), (torch.uint8,), torch.uint8),
        Source(names["scale"], (OUTPUTS, Axis("inputs", 16)), (E4M3,), E4M3),
        Source(names["factor"], (), SCALES, torch.float32),
    )

    def pack(read: Tensors) -> Tensors:
        factor = read[names["factor"]].view(-1)
        rows = torch.tensor(info.parts, device=factor.device)
        outer = (1 / factor if inverse else factor).repeat_interleave(rows)
        return form.packed(nibbles(read[names["weight"]]), read[names["scale"]], outer=outer)

    return Scheme(form, sources, pack)


def mxfp4(weight: str, scale: str) -> Scheme:
    """A power of two for each 32 inputs."""
    form = Grouped("e2m1", 32, scale=torch.uint8)
    sources = (
        Source(weight, (OUTPUTS, Axis("inputs", 2)), (torch.uint8,), torch.uint8),
        Source(scale, (OUTPUTS, Axis("inputs", 32)), (torch.uint8,), torch.uint8),
    )
    return Scheme(form, sources, lambda read: form.packed(nibbles(read[weight]), read[scale]))


def nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k / 2], low halves first → [n, k]."""
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)
