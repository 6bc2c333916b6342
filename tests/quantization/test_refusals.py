"""What a checkpoint's quantization_config says is honoured or refused by name, and so is what its files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.config.model_info import read_model_info
from quire.config.quantization import METHODS, resolve_quantization
from quire.foundation.errors import ConfigError, WeightsError
from quire.quantization.select import make_method
from tests.models import checkpoints
from tests.quantization import writers
from tests.quantization.test_floats import FLOAT8, fp8, modelopt, tensors
from tests.quantization.test_integers import ct_config, gptq_config, load

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}


def changed(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Of compressed-tensors' one group."""
    return {**config, "config_groups": {"group_0": {**config["config_groups"]["group_0"], **more}}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (gptq_config(5, 32), "bits must be one of 2, 3, 4, 8, got 5"),
        (gptq_config(4, 0), "group_size must be -1 or >= 1, got 0"),
        (gptq_config(4, 32, checkpoint_format="marlin"), "must be one of gptq, gptq_v2, got 'marlin'"),
        (gptq_config(4, 32, dynamic={"-:[": {}}), "dynamic: '\\[' is no regular expression"),
        (gptq_config(4, 32, dynamic={"+:x": {"rotation": "hadamard"}}), "rotation='hadamard'"),
        (gptq_config(4, 32, rotation="hadamard"), "GPTQ checkpoints with rotation='hadamard' are not supported"),
        ({**AWQ, "bits": 8}, "bits must be one of 4, got 8"),
        ({**AWQ, "version": "gemv"}, "version must be one of gemm, got 'gemv'"),
        ({**ROUND, "data_type": "mx_fp"}, "data_type must be one of int, got 'mx_fp'"),
        ({**ROUND, "act_bits": 8}, "act_bits=8"),
        (fp8(activation_scheme="static", weight_block_size=[128, 128]), "goes with activation_scheme=dynamic"),
        (fp8(fmt="e5m2"), "fmt must be one of e4m3"),
        (fp8(weight_block_size=[128]), "weight_block_size must be two sizes"),
        (modelopt("W4A8_AWQ"), "quant_algo must be one of FP8, .*, got 'W4A8_AWQ'"),
        (modelopt("NVFP4", group_size=32), "group_size=32 with NVFP4"),
        (ct_config(4, 32, strategy="tensor"), "packed integers of 4 bits by tensor"),
        ({**ct_config(4, 32), "format": "mxfp6-pack-quantized"}, "format must be one of .*, got 'mxfp6-"),
        ({**ct_config(4, 32), "sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}}, "2:4"),
        ({**ct_config(4, 32), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config.*R1"),
        (changed(ct_config(4, 32), targets=["Embedding"]), "quantized Embedding is not supported"),
        (changed(ct_config(4, 32), output_activations=FLOAT8), "output_activations are not supported"),
        (tensors("int-quantized", {"num_bits": 4, "strategy": "block"}), "integers by block, actorder=None"),
        (tensors("float-quantized", {**FLOAT8, "strategy": "group", "group_size": 64}), "8-bit floats by group of 64"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_are_not_supported(config: dict[str, Any], words: str) -> None:
    name = {"auto-round": "auto_round"}.get(config["quant_method"], config["quant_method"])
    with pytest.raises(ConfigError, match=words):
        make_method(name, config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return writers.make(tmp_path_factory.mktemp("gptq"), "Llama", lambda _: writers.gptq(4, 32), gptq_config(4, 32))


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_file_of_the_method_will_do(copied: Path) -> None:
    """Older checkpoints have their settings beside config.json."""
    settings = json.loads((copied / "config.json").read_text())["quantization_config"]
    checkpoints.rewrite_config(copied, quantization_config=None)
    del settings["quant_method"]
    (copied / "quantize_config.json").write_text(json.dumps(settings))
    assert read_model_info(copied, {}).quantization["quant_method"] == "gptq"
    assert load(copied).layers[0].mlp.down_proj.scheme.format.kind == "int4"


def test_a_method_that_nobody_knows(copied: Path) -> None:
    writers.settings(copied, quant_method="aqlm")
    with pytest.raises(ConfigError, match=r"quant_method='aqlm' are not supported \(known: fp8, fbgemm_fp8, mxfp4"):
        LLM(str(copied), device="cpu", skip_tokenizer_init=True)
    writers.settings(copied, quant_method=None, desc_act=None)
    with pytest.raises(ConfigError, match="group_size and bits without a quant_method are of MLX"):
        read_model_info(copied, {})
    writers.settings(copied, group_size=None)
    with pytest.raises(ConfigError, match="quant_method=None"):
        read_model_info(copied, {})


def test_groups_that_do_not_fit(copied: Path) -> None:
    writers.settings(copied, group_size=40)
    with pytest.raises(ConfigError, match="q_proj has 64 inputs, no multiple of 40"):
        load(copied)


def test_files_that_do_not_fit(copied: Path) -> None:
    state = load_file(copied / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    state[f"{name}.scales"] = torch.ones(5, 64, dtype=torch.float16)
    del state[f"{name}.qzeros"]
    state[f"{name}.qweight"] = state[f"{name}.qweight"].float()
    save_file(state, copied / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        load(copied)
    for words in (f"{name}.qzeros [3, 8]", f"{name}.scales is [5, 64]", f"{name}.qweight is torch.float32"):
        assert words in str(caught.value)


def test_an_order_that_the_settings_do_not_know(copied: Path) -> None:
    state = load_file(copied / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj"
    state[f"{name}.g_idx"] = state[f"{name}.g_idx"].flip(0).contiguous()
    save_file(state, copied / "model.safetensors")
    with pytest.raises(WeightsError, match=f"g_idx of {name} is sorted"):
        load(copied)
    state[f"{name}.g_idx"] = torch.zeros(64, dtype=torch.int32)
    del state["model.layers.0.self_attn.o_proj.g_idx"]
    save_file(state, copied / "model.safetensors")
    load(copied)


def test_the_option_agrees_with_the_checkpoint(folder: Path) -> None:
    own = read_model_info(folder, {}).quantization
    assert resolve_quantization(None, own) == resolve_quantization("gptq_marlin", own) == "gptq"
    with pytest.raises(ConfigError, match="quantization=awq, but the checkpoint is quantized by gptq"):
        resolve_quantization("awq", own)
    with pytest.raises(ConfigError, match="not quantized; while it loads it can be by fp8, fp8_block, int8"):
        resolve_quantization("gptq", {})
    assert resolve_quantization("int4", {}) == "int4"
    for name in METHODS:
        assert callable(METHODS.get(name).of_checkpoint)
