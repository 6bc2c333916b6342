"""A LoRA adapter's tensors by module, as the peft library names them, each checked for its shape.

`base_model.model.`, the module's path, and `.lora_A.weight` [rank, inputs] with `.lora_B.weight` [outputs, rank]; of
embeddings `.lora_embedding_A` [rank, vocabulary] and `.lora_embedding_B` [hidden, rank]; `.lora_magnitude_vector`
[outputs] for DoRA. A mixture's experts may have one pair together, [experts * rank, inputs] and [outputs, rank *
experts]: an expert's lines of A stand together, and of B columns e, e + experts, e + 2 * experts … are expert e's.

Files that another tool has written may lack the beginning or have it twice, hold peft's `default`, or what modules were
wrapped in.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from quire.config.peft import PARAM, PeftConfig
from quire.foundation.errors import WeightsError
from quire.models.safetensors_file import MalformedFileError, SafetensorsFile
from quire.models.spelling import WRAPPERS
from quire.quantization.base import FLOATS

_NAME = re.compile(
    r"^(?:module\.)?(?:base_model\.model\.)*(?P<module>.+?)\.(?P<what>lora_A|lora_B|lora_embedding_A|lora_embedding_B|"
    r"lora_magnitude_vector|base_layer\.weight|base_layer\.bias)(?:\.default)?(?:\.weight)?$"
)
_SHOWN = 8
BASE, BASE_BIAS = "base_layer", "base_layer.bias"
Tensors = dict[str, torch.Tensor]
"""Of one module: lora_A, lora_B, lora_magnitude_vector, base_layer, base_layer.bias."""


class Pair(NamedTuple):
    """Factors of one matrix [n, k], as they were trained but for the scale, which is in `up`."""

    down: torch.Tensor  # float32 [rank, k]
    up: torch.Tensor  # float32 [n, rank]
    magnitude: torch.Tensor | None  # float32 [n]


def read_tensors(file: Path) -> dict[str, Tensors]:
    """By module. Raises WeightsError."""
    found: dict[str, Tensors] = defaultdict(dict)
    problems: list[str] = []
    try:
        with SafetensorsFile(file) as opened:
            for name, entry in opened.entries.items():
                match = _NAME.match(WRAPPERS.sub("", name))
                if match is None or entry.dtype not in FLOATS:
                    why = "no factor of a LoRA adapter" if match is None else f"{entry.dtype}, and no floating point"
                    problems.append(f"{name} is {why}")
                    continue
                tensor = torch.empty(entry.shape, dtype=entry.dtype)
                if tensor.numel():
                    opened.read_into(tensor.view(-1).view(torch.uint8).numpy().data, entry.start)
                if not tensor.isfinite().all():
                    problems.append(f"{name} holds NaN or infinity")
                what = match["what"].removesuffix(".weight").replace("embedding_", "")
                if what in found[match["module"]]:
                    problems.append(f"{name} is there under another name too")
                found[match["module"]][what] = tensor
    except (MalformedFileError, OSError) as error:
        raise WeightsError(f"{file} {error}" if isinstance(error, MalformedFileError) else str(error), PARAM) from error
    raise_if_any(file, problems)
    if not found:
        raise WeightsError(f"{file} holds no tensors", PARAM)
    return found


def pair_of(config: PeftConfig, module: str, tensors: Tensors, outputs: int, inputs: int) -> Pair:
    """A module's factors, for a matrix of this shape. Raises WeightsError."""
    rank = config.rank_of(module)
    shapes: dict[str, tuple[int, ...]] = {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}
    if config.use_dora:
        shapes["lora_magnitude_vector"] = (outputs,)
    _check(module, tensors, shapes)
    magnitude = tensors.get("lora_magnitude_vector")
    up = _scaled(config, module, tensors["lora_B"])
    return Pair(tensors["lora_A"].float(), up, None if magnitude is None else magnitude.float())


def experts_pairs(
    config: PeftConfig, module: str, tensors: Tensors, experts: int, outputs: int, inputs: int
) -> list[Pair]:
    """Of all experts, whose matrices of this shape are one parameter. Raises WeightsError."""
    rank = config.rank_of(module)
    _check(module, tensors, {"lora_A": (experts * rank, inputs), "lora_B": (outputs, rank * experts)})
    down = tensors["lora_A"].float().view(experts, rank, inputs)
    up = _scaled(config, module, tensors["lora_B"]).view(outputs, rank, experts)
    return [Pair(down[e], up[:, :, e], None) for e in range(experts)]


def _scaled(config: PeftConfig, module: str, up: torch.Tensor) -> torch.Tensor:
    scale = config.scale_of(module)
    scaled = up.float() * scale
    if not scaled.isfinite().all():
        raise WeightsError(f"{module}.lora_B times {scale:g}, which lora_alpha and the rank make, is infinite", PARAM)
    return scaled


def _check(module: str, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for what, shape in shapes.items():
        if what not in tensors:
            raise WeightsError(f"{module} lacks {what}", PARAM)
        if tuple(tensors[what].shape) != shape:
            raise WeightsError(
                f"{module}.{what} is {list(tensors[what].shape)}, the model and the adapter's rank need {list(shape)}",
                PARAM,
            )
    if left := tensors.keys() - shapes.keys() - {BASE, BASE_BIAS}:
        raise WeightsError(f"{module} has {', '.join(sorted(left))}, which its config does not speak of", PARAM)


def raise_if_any(file: Path, problems: list[str]) -> None:
    """Raises WeightsError that lists them."""
    if problems:
        lines = problems[:_SHOWN] + ([f"… and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])
        raise WeightsError(f"{file} does not fit the model:\n" + "\n".join(f"  {line}" for line in lines), PARAM)
