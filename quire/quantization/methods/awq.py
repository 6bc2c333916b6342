"""AWQ (Lin et al., 2023), as its `gemm` files have it: integers of 4 bits packed along the outputs, eight a word in an
order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.config.reading import read
from quire.quantization.base import (
    INPUTS,
    OUTPUTS,
    Axis,
    MatrixInfo,
    QuantizationMethod,
    Scheme,
    Source,
    Tensors,
    plain_scheme,
)
from quire.quantization.grouped import Grouped
from quire.quantization.methods.bits import unpack
from quire.quantization.methods.modules import (
    check_multiples,
    is_part,
    names_of,
    of_all,
    one_of,
    refuse_unknown,
)
from quire.quantization.methods.settings import KEYS, Dynamic, Settings, check_integers

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight numbers in a word


class AWQ(QuantizationMethod):
    def __init__(self, config: Mapping[str, Any]) -> None:
        check_integers(config)
        for key in ("version", "format", "checkpoint_format"):  # the last two as GPTQModel calls it
            one_of({key: str(config.get(key) or "gemm").lower()}, key, ("gemm",), "gemm")
        group = read(int, config, "group_size" if "group_size" in config else "q_group_size", 128)
        zeros = read(bool, config, "zero_point", default=True)  # whatever `sym` says, which transformers always writes
        bits = one_of(config, "bits" if "bits" in config else "w_bit", (4,), None)
        self._settings = Settings.read({"bits": bits, "group_size": group, "sym": not zeros})
        self._dynamic = Dynamic(config.get("dynamic"), self._settings)
        self._head = read(bool, config, "lm_head", default=False)
        self._skipped = names_of(config, "modules_to_not_convert")

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> AWQ:
        known = (
            "w_bit", "q_group_size", "zero_point", "version", "format", "checkpoint_format", "method", "lm_head",
            "dynamic", "modules_to_not_convert", *KEYS,
        )  # fmt: skip
        refuse_unknown(config, known, "AWQ")
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        settings = None if info.role == "vocabulary" and not self._head else of_all(info, self._of_module)
        return plain_scheme(info.dtype) if settings is None else awq_scheme(info, settings)

    def _of_module(self, module: str) -> Settings | None:
        return self._dynamic.of_module(module, None if is_part(module, self._skipped) else self._settings)


def awq_scheme(info: MatrixInfo, settings: Settings) -> Scheme:
    """Of a matrix whose modules have qweight, qzeros and scales. Raises ConfigError for other bits than 4."""
    one_of({"bits": settings.bits}, "bits", (4,), None)
    group, has_zeros = settings.group or info.columns, not settings.symmetric
    check_multiples(info, inputs=group, outputs=8)
    words, groups = Axis("outputs", 8), Axis("inputs", group) if group < info.columns else 1
    sources = [
        Source("qweight", (INPUTS, words), (torch.int32,), torch.int32),
        Source("scales", (groups, OUTPUTS), FLOATS, torch.float16),
        # Files without zeros of their own may have those that stand for 8.
        Source("qzeros", (groups, words), (torch.int32,), torch.int32, default=None if has_zeros else 0),
    ]
    form = Grouped(
        "int4", group if group < info.columns else 0, scale=torch.float16, zero=torch.uint8 if has_zeros else None
    )

    def pack(read: Tensors) -> Tensors:
        zero = _outputs_first(read["qzeros"]) if has_zeros else None
        return form.packed(_outputs_first(read["qweight"]), read["scales"].t().contiguous(), zero)

    return Scheme(form, tuple(sources), pack)


def _outputs_first(words: torch.Tensor) -> torch.Tensor:
    """int32 [k, n / 8] → uint8 [n, k]."""
    order = torch.tensor(PLACES, device=words.device)
    numbers = unpack(words, 4).view(len(words), -1, 8)[..., order]
    return numbers.flatten(1).t().contiguous()
