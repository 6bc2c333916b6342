"""fp8: plain checkpoints while they load, and those of `quant_method` fp8: DeepSeek's and Qwen's blocks of 128 × 128,
or a scale a tensor; and of fbgemm_fp8 (Meta's Llama 3.1 405B): a scale an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.quantization.base import MatrixInfo, QuantizationMethod, Scheme, plain_scheme
from quire.quantization.methods import floats
from quire.quantization.methods.modules import OPTION, is_part, names_of, of_all, one_of, refuse_unknown
from quire.quantization.methods.online import Online


class Fp8(Online):
    format_name = "fp8"

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> QuantizationMethod:
        return Fp8Checkpoint(config)


class Fp8Checkpoint(QuantizationMethod):
    unused = floats.UNUSED

    def __init__(self, config: Mapping[str, Any]) -> None:
        known = (
            "activation_scheme", "ignored_layers", "modules_to_not_convert", "weight_block_size", "fmt", "scale_fmt",
            "is_checkpoint_fp8_serialized", "dequantize", "weight_per_tensor",
        )  # fmt: skip
        refuse_unknown(config, known, "FP8")
        scheme = one_of(config, "activation_scheme", ("static", "dynamic"), "dynamic")
        one_of(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        one_of(config, "scale_fmt", ("ue8m0", "float"), "float")
        self._skipped = [*names_of(config, "ignored_layers"), *names_of(config, "modules_to_not_convert")]
        self._block = _block(config.get("weight_block_size"))
        if self._block is None:  # transformers calls one of a tensor as one of blocks
            self.renamed = {"weight_scale_inv": "weight_scale"}
        if self._block and scheme == "static":
            raise ConfigError("quantization_config: weight_block_size goes with activation_scheme=dynamic", OPTION)

    def scheme(self, info: MatrixInfo) -> Scheme:
        if info.role == "vocabulary" or of_all(info, lambda module: is_part(module, self._skipped)):
            return plain_scheme(info.dtype)
        if self._block:
            return floats.per_block(info, *self._block, "weight_scale_inv")
        return floats.per_tensor(info)


class FbgemmFp8(QuantizationMethod):
    """`activation_scale_ub`, at which its own kernel cuts activations off before it rounds them, is not followed: rows
    are rounded by scales of their own, whatever these are."""

    unused = rf"{floats.UNUSED}|\.input_scale_ub$"

    def __init__(self, config: Mapping[str, Any]) -> None:
        refuse_unknown(config, ("activation_scale_ub", "modules_to_not_convert"), "FBGEMM")
        self._skipped = names_of(config, "modules_to_not_convert")

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any]) -> FbgemmFp8:
        return cls(config)

    def scheme(self, info: MatrixInfo) -> Scheme:
        if info.role == "vocabulary" or of_all(info, lambda module: is_part(module, self._skipped)):
            return plain_scheme(info.dtype)
        return floats.per_channel()


def _block(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(one) is int and one > 0 for one in size):
        raise ConfigError(f"quantization_config: weight_block_size must be two sizes, got {shown(size)}", OPTION)
    return size[0], size[1]
