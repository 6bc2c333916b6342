"""Quantization methods by name: what `quantization` may say, and what a checkpoint says of itself. The worker imports
what is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.reading import check_integers
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import read_json_object, shown
from quire.foundation.registry import Registry

_METHODS = "quire.quantization.methods"
METHODS = Registry(
    "quantization method",
    {
        "fp8": f"{_METHODS}.fp8:Fp8",
        "fp8_block": f"{_METHODS}.online:Fp8Block",
        "int8": f"{_METHODS}.online:Int8",
        "int4": f"{_METHODS}.online:Int4",
        "fbgemm_fp8": f"{_METHODS}.fp8:FbgemmFp8",
        "mxfp4": f"{_METHODS}.mxfp4:Mxfp4",
        "nvfp4": f"{_METHODS}.online:Nvfp4",
        "nf4": f"{_METHODS}.online:Nf4",
        "gptq": f"{_METHODS}.gptq:GPTQ",
        "awq": f"{_METHODS}.awq:AWQ",
        "auto_round": f"{_METHODS}.auto_round:AutoRound",
        "compressed-tensors": f"{_METHODS}.compressed_tensors:CompressedTensors",
        "bitsandbytes": f"{_METHODS}.bitsandbytes:BitsAndBytes",
        "modelopt": f"{_METHODS}.modelopt:ModelOpt",
        "torchao": f"{_METHODS}.torchao:TorchAO",
        "hqq": f"{_METHODS}.hqq:HQQ",
        "quark": f"{_METHODS}.quark:Quark",
        "squeezellm": f"{_METHODS}.squeezellm:SqueezeLLM",
        "gguf": f"{_METHODS}.gguf:Gguf",
    },
    contract="quire.quantization.base:QuantizationMethod",
    needs=("scheme", "refuses"),
    is_class=True,
)
OF_CHECKPOINTS = (
    "fbgemm_fp8",
    "gptq",
    "awq",
    "auto_round",
    "compressed-tensors",
    "modelopt",
    "bitsandbytes",
    "torchao",
    "hqq",
    "quark",
    "squeezellm",
    "gguf",
)  # that nothing else can be made into
ONLINE_ONLY = ("fp8_block", "int8", "int4", "nvfp4", "nf4")  # names that no checkpoint has
# What else methods are called, by checkpoints and by users of other engines.
ALIASES = {
    "gptq_marlin": "gptq", "auto_gptq": "gptq", "awq_marlin": "awq", "auto_awq": "awq", "inc": "auto_round",
    "auto-round": "auto_round", "autoround": "auto_round", "compressed_tensors": "compressed-tensors",
    "bnb": "bitsandbytes", "gpt_oss_mxfp4": "mxfp4",
    "modelopt_fp4": "modelopt", "modelopt_mxfp8": "modelopt", "modelopt_mixed": "modelopt",
    "fp8_per_channel": "fp8", "fp8_per_block": "fp8_block", "int8_per_channel_weight_only": "int8",
}  # fmt: skip
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # of config.json
# Where methods keep their settings if not in config.json, and whose a file without a name in it is.
FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def check_quantization(name: str) -> None:
    """Raises ConfigError naming the methods there are."""
    METHODS.check(ALIASES.get(name, name), "quantization")


def checkpoint_quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """How the weights in a folder are quantized, as it says itself, with the name of the method as `quant_method`; {}:
    they are not. config: its config.json.

    Raises ConfigError for a method that there is not.
    """
    found = next(filter(None, map(config.get, QUANTIZATION_KEYS)), None)
    name = None
    if not found and "quantization_config" not in config:
        for file, method in FILES.items():
            if (folder / file).is_file():
                found, name = read_json_object(folder / file, "model"), method
                check_integers(found, "", file=str(folder / file))
                break
    if not found:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"config.json: quantization_config must be an object, got {shown(found)}", "quantization")
    told = found.get("quant_method", name) or _guess(found)
    if told is None and {"group_size", "bits"} <= found.keys():
        raise ConfigError(
            "quantization_config: group_size and bits without a quant_method are of MLX, whose files are for Apple's "
            "devices and are not supported: name the model that it was made of, or a GGUF file of it",
            "quantization",
        )
    method = ALIASES.get(str(told).lower(), str(told).lower())
    if method not in METHODS or method in ONLINE_ONLY:
        known = ", ".join(name for name in METHODS if name not in ONLINE_ONLY)
        raise ConfigError(
            f"quantization_config: checkpoints of quant_method={shown(told)} are not supported (known: {known})",
            "quantization",
        )
    return {**found, "quant_method": method}


def _guess(config: Mapping[str, Any]) -> str | None:
    """By keys that one method alone has."""
    keys = {"config_groups": "compressed-tensors", "quant_algo": "modelopt", "w_bit": "awq", "desc_act": "gptq"}
    return next((method for key, method in keys.items() if key in config), None)


def resolve_quantization(wanted: str | None, checkpoint: Mapping[str, Any]) -> str | None:
    """The method that is used; None: weights are as the checkpoint has them.

    Raises ConfigError for an unknown name, one that is not the checkpoint's, or one that needs a checkpoint of its own.
    """
    own = checkpoint.get("quant_method")
    if wanted is None:
        return own
    check_quantization(wanted)
    name = ALIASES.get(wanted, wanted)
    if own is not None and own != name:
        raise ConfigError(
            f"quantization={wanted}, but the checkpoint is quantized by {own}: leave it out", "quantization"
        )
    if own is None and name in OF_CHECKPOINTS:
        online = ", ".join(method for method in METHODS if method not in OF_CHECKPOINTS)
        raise ConfigError(
            f"quantization={wanted} reads checkpoints that are quantized so, and this one is not quantized; while it "
            f"loads it can be by {online}",
            "quantization",
        )
    return name
