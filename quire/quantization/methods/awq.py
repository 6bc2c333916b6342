"""AWQ (Lin et al., 2023), as its `gemm` files have it: integers of 4 bits packed along the outputs, eight a word in an
order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.config.reading import read
from quire.foundation.errors import ConfigError
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
    OPTION,
    check_multiples,
    is_part,
    names_of,
    of_all,
    one_of,
    refuse_unknown,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight numbers in a word
_HISTORY = ("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "backend", "duo_scaling", "apply_clip")


class AWQ(QuantizationMethod):
    def __init__(self, config: Mapping[str, Any]) -> None:
        one_of(config, "bits" if "bits" in config else "w_bit", (4,), None)
        one_of({"version": str(config.get("version") or "gemm").lower()}, "version", ("gemm",), "gemm")
        self._group = read(int, config, "group_size" if "group_size" in config else "q_group_size", 128)
        if self._group < 1 and self._group != -1:
            raise ConfigError(f"quantization_config: group_size must be -1 or >= 1, got {self._group}", OPTION)
        self._has_zeros = read(bool, config, "zero_point", default=True)
        self._head = read(bool, config, "lm_head", default=False)
        self._skipped = names_of(config, "modules_to_not_convert")

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> AWQ:
        known = (
            "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "lm_head", "modules_to_not_convert",
            *_HISTORY,
        )  # fmt: skip
        refuse_unknown(config, known, "AWQ")
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        plain = info.role == "vocabulary" and not self._head
        if plain or of_all(info, lambda module: is_part(module, self._skipped)):
            return plain_scheme(info.dtype)
        return awq_scheme(info, self._group, has_zeros=self._has_zeros)


def awq_scheme(info: MatrixInfo, group: int, *, has_zeros: bool) -> Scheme:
    """Of a matrix whose modules have qweight, qzeros and scales. group -1: all inputs."""
    group = info.columns if group == -1 else group
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
