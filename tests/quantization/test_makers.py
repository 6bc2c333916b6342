"""Checkpoints as the tools write them: their words in the settings, their names of tensors and modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.config.quantization import checkpoint_quantization
from quire.foundation.errors import WeightsError
from quire.quantization.select import make_method
from tests.quantization import writers
from tests.quantization.test_bitsandbytes import eight_bits, four_bits
from tests.quantization.test_floats import _OPT, fp8, fp8_block, fp8_tensor, modelopt, nvfp4
from tests.quantization.test_integers import assert_same_answers, ct_config, gptq_config, load
from tests.quantization.writers import PLAIN, Writer, awq, gptq, make, pack_quantized

BY_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "awq": ("AwqConfig", {"modules_to_not_convert": ["gate"]}),
    "gptq": ("GPTQConfig", {"bits": 4, "dataset": "c4", "tokenizer": "some/model"}),
    "auto-round": ("AutoRoundConfig", {"bits": 4, "group_size": 64}),
    "bitsandbytes-4": ("BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}),
    "bitsandbytes-8": ("BitsAndBytesConfig", {"load_in_8bit": True}),
    "fp8": ("FineGrainedFP8Config", {}),
    "fp8-tensor": ("FineGrainedFP8Config", {"weight_block_size": None, "activation_scheme": "static"}),
    "hqq": ("HqqConfig", {"nbits": 4, "group_size": 64}),
    "mxfp4": ("Mxfp4Config", {}),
}


@pytest.mark.parametrize("method", BY_TRANSFORMERS)
def test_settings_that_transformers_writes(method: str, tmp_path: Path) -> None:
    """All of its classes' keys, with their defaults, are known."""
    name, arguments = BY_TRANSFORMERS[method]
    written = getattr(transformers, name)(**arguments).to_dict()
    found = checkpoint_quantization(tmp_path, {"quantization_config": json.loads(json.dumps(written, default=str))})
    make_method(found["quant_method"], found)


BY_AUTO_ROUND = {
    "provider": "auto-round", "autoround_version": "0.9.1", "iters": 1000, "nsamples": 512, "seqlen": 512,
    "data_type": "int", "low_gpu_mem_usage": True, "enable_quanted_input": False, "act_bits": 16, "batch_size": 4,
    "true_sequential": False, "damp_percent": 0.01,
}  # fmt: skip
BY_GPTQMODEL = {
    "format": "gemm", "checkpoint_format": "gemm", "method": "awq", "desc_act": False, "pack_dtype": "int32",
    "lm_head": False, "meta": {"quantizer": ["gptqmodel:5.6.0"], "uri": "https://github.com/modelcloud/gptqmodel"},
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
_SOME = {".*mlp\\.down_proj.*": {"bits": 8}, "model.layers.0.mlp.down_proj": {"bits": 2}, ".*o_proj$": {"bits": 16}}


def of_some(module: str) -> Writer | None:
    """What `_SOME` says of one: a name goes before patterns."""
    if module == "model.layers.0.mlp.down_proj":
        return gptq(2, 32)
    return None if "o_proj" in module else gptq(8 if "down_proj" in module else 4, 32)


def by_layers(module: str) -> Writer | None:
    """What `_LAYERS` says of one."""
    if module == "model.layers.1.mlp.down_proj" or module.startswith("model.layers.0.block_sparse_moe.experts"):
        return nvfp4(_OPT, inverse=False)
    return fp8_tensor() if "self_attn" in module else None


_LAYERS = {
    "model.layers.0.self_attn": {"quant_algo": "FP8"}, "model.layers.1.self_attn.*": {"quant_algo": "FP8"},
    "model.layers.1.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.0.block_sparse_moe.experts": {"quant_algo": "NVFP4", "group_size": 16},
}  # fmt: skip


def but(part: str, writer: Writer) -> Any:
    """All modules but those of which this is a part of the name."""
    return lambda module: None if part in module else writer


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "gptq-by-autoround": ("Llama", lambda _: gptq(4, 32), {**gptq_config(4, 32), **BY_AUTO_ROUND}),
    "awq-by-autoround": ("Llama", lambda _: awq(32), {**AWQ, **BY_AUTO_ROUND, "sym": False}),
    "awq-by-gptqmodel": ("Qwen3", lambda _: awq(32), {**AWQ, **BY_GPTQMODEL}),
    "awq-dynamic": ("Llama", but("down_proj", awq(32)), {**AWQ, "dynamic": {"-:.*down_proj": {}}}),
    "autoround-patterns": (
        "Llama", of_some, {**ROUND, "extra_config": _SOME, "block_name_to_quantize": "model.layers"},
    ),
    "autoround-zeros": (
        "Llama",
        lambda _: gptq(2, 32, symmetric=False, older=False),
        {**ROUND, "bits": 2, "sym": False, "packing_format": "auto_round"},
    ),
    "autoround-zeros-of-some": (
        "Llama",
        lambda module: gptq(4, 32, symmetric="k_proj" not in module, older=False),
        {**ROUND, "packing_format": "auto_round:gptqmodel", "extra_config": {".*k_proj": {"sym": False}}},
    ),
    "modelopt-cache-alone": ("Llama", lambda _: None, modelopt("FP8", quant_algo=None, kv_cache_quant_algo="FP8")),
    "modelopt-mixed": ("Llama", by_layers, modelopt("MIXED_PRECISION", quantized_layers=_LAYERS)),
    "modelopt-mixed-experts": ("Mixtral", by_layers, modelopt("MIXED_PRECISION", quantized_layers=_LAYERS)),
    # A pattern of wildcards that a module matches is about all that is in it.
    "fp8-wildcards": (
        "Llama",
        but("self_attn", fp8_block("weight_scale_inv", 32, 32)),
        fp8(weight_block_size=[32, 32], modules_to_not_convert=["model.layers.*.self_attn"]),
    ),
    "modelopt-wildcards": (
        "Qwen3", but("self_attn", nvfp4(_OPT, inverse=False)),
        modelopt("NVFP4", exclude_modules=["lm_head", "*.self_attn"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_of_makers(case: str, tmp_path: Path) -> None:
    family, writer, config = CASES[case]
    assert_same_answers(make(tmp_path, family, writer, config))


@pytest.mark.parametrize("family", ["Llama", "Ministral3", "Mixtral"])
def test_fp8_by_tensor_under_transformers_names(family: str, tmp_path: Path) -> None:
    """`weight_scale_inv` and `activation_scale`, as for blocks; others write weight_scale and input_scale."""

    def write(weight: torch.Tensor) -> writers.Written:
        tensors, dense = fp8_tensor()(weight)
        names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
        return {names.get(name, name): tensor for name, tensor in tensors.items()}, dense

    config = fp8(activation_scheme="static", dequantize=False, modules_to_not_convert=["lm_head", "gate"])
    assert_same_answers(make(tmp_path, family, lambda _: write, config))


def test_biases_of_zeros_that_no_layer_has(tmp_path: Path) -> None:
    """AutoGPTQ gives one to each layer. Others than zeros are not left out."""
    folder = make(tmp_path, "Llama", lambda _: gptq(4, 32), gptq_config(4, 32))
    state = load_file(folder / "model.safetensors")
    biases = {name.replace(".scales", ".bias"): tensor[0] * 0 for name, tensor in state.items() if "scales" in name}
    save_file(state | biases, folder / "model.safetensors")
    assert_same_answers(folder)
    biases["model.layers.1.mlp.up_proj.bias"][5] = 1
    save_file(state | biases, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"no place for:\n *model\.layers\.1\.mlp\.up_proj\.bias \[96\]$"):
        load(folder)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_group_is_chosen_by_name_before_patterns(is_first: bool, tmp_path: Path) -> None:
    """As the library of compressed-tensors does, in whatever order the groups are told."""
    four, eight = (ct_config(bits, 32)["config_groups"]["group_0"] for bits in (4, 8))
    one = "model.layers.1.mlp.down_proj"
    groups = [{**four, "targets": ["re:.*proj$"]}, {**eight, "targets": [one, "re:.*v_proj"]}]
    config = ct_config(4, 32)
    config["config_groups"] = {f"group_{i}": group for i, group in enumerate(groups[:: 1 if is_first else -1])}

    def writer(module: str) -> Writer:
        return pack_quantized(8 if module == one else 4, 32)  # "re:.*proj$" comes before "re:.*v_proj"

    assert_same_answers(make(tmp_path, "Llama", writer, config))


@pytest.mark.parametrize("family", ["GPTNeoX", "Phi3"])
def test_parts_may_begin_inside_a_block(family: str, tmp_path: Path) -> None:
    """Of a module that holds queries, keys and values, one after the other or by heads."""
    config, plain = fp8(weight_block_size=[48, 32]), (*PLAIN, "embed_")
    assert_same_answers(make(tmp_path, family, lambda _: fp8_block("weight_scale_inv", 48, 32), config, plain))


# What files have in plain numbers is plain, whatever the settings say: families, which modules, and the method.
LEFT_OUT: dict[str, tuple[str, str, Writer, dict[str, Any]]] = {
    "experts": ("Mixtral", ".experts.", gptq(4, 32), gptq_config(4, 32)),
    "some-experts-matrices": ("Mixtral", ".w2", gptq(4, 32), gptq_config(4, 32)),
    "some-of-one-matrix": ("Llama", ".k_proj", pack_quantized(4, 32), ct_config(4, 32)),
    "head": ("GPTNeoX", "embed_", pack_quantized(4, 16), {**ct_config(4, 16), "ignore": []}),
    "layers": ("Qwen3", "layers.1", fp8_block("weight_scale_inv", 32, 32), fp8(weight_block_size=[32, 32])),
    "biased": ("Qwen2", "self_attn", awq(32), AWQ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_files_have_plain_is_plain(case: str, tmp_path: Path) -> None:
    family, part, writer, config = LEFT_OUT[case]
    assert_same_answers(make(tmp_path, family, but(part, writer), config))


def test_experts_in_one_plain_tensor(tmp_path: Path) -> None:
    """As transformers has them in memory."""
    folder = make(tmp_path, "Qwen3Moe", but(".experts.", pack_quantized(4, 32)), ct_config(4, 32))
    state = load_file(folder / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        own = [[state.pop(f"{name}.{i}.{part}_proj.weight") for part in ("gate", "up", "down")] for i in range(4)]
        state[f"{name}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in own])
        state[f"{name}.down_proj"] = torch.stack([down for _, _, down in own])
    save_file(state, folder / "model.safetensors")
    assert_same_answers(folder)


ROUTED: dict[str, tuple[str, Writer, dict[str, Any]]] = {
    "bitsandbytes": (
        "Qwen3Moe", four_bits("nf4", nested=False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "bitsandbytes-8": ("Mixtral", eight_bits, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "compressed-tensors": ("Mixtral", pack_quantized(4, 32), {**ct_config(4, 32), "ignore": ["lm_head"]}),
    "shared-expert": ("Qwen2Moe", fp8_tensor(), fp8(activation_scheme="static")),
}  # fmt: skip


@pytest.mark.parametrize("case", ROUTED)
def test_routers_that_files_have_quantized(case: str, tmp_path: Path) -> None:
    """And gates of shared experts. They are plain here, and made of what the files have."""
    family, writer, config = ROUTED[case]
    assert_same_answers(make(tmp_path, family, lambda _: writer, config, ("embed_tokens", "lm_head", "norm")))


def test_settings_that_speak_of_no_plain_ones_are_not_overheard(tmp_path: Path) -> None:
    """A plain matrix beside a quantized one's tensors is none, and is told."""
    folder = make(tmp_path, "Llama", lambda _: gptq(4, 32), gptq_config(4, 32))
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    state[f"{name}.weight"] = torch.zeros(96, 64)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"no place for:\n *model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)
