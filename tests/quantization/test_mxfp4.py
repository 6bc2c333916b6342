"""gpt-oss as it is published: experts in MXFP4, all of a layer in one tensor, the rest plain."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.config.model_info import read_model_info
from quire.layers.experts import Experts
from quire.quantization.base import WeightFormat
from quire.quantization.grouped import Grouped
from tests.models import checkpoints
from tests.models.sparse_checkpoints import CASES
from tests.quantization.test_floats import mxfp4
from tests.quantization.test_integers import assert_same_answers, load

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def make(folder: Path) -> Path:
    dense, quantized = folder / "dense", folder / "quantized"
    family, config = CASES["gpt_oss"]
    config = {key: value for key, value in config.items() if key != "layer_types"}
    checkpoints.save(checkpoints.make(family, **{**config, **SIZES}), dense)
    state, packed = load_file(dense / "model.safetensors"), {}
    for name, tensor in state.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = tensor
            continue
        written = [mxfp4(one) for one in tensor.transpose(1, 2).contiguous()]
        scales = torch.stack([found["weight_scale"] for found, _ in written])
        blocks = torch.stack([found["weight_packed"] for found, _ in written])
        packed |= {f"{name}_scales": scales, f"{name}_blocks": blocks.view(*scales.shape, 16)}
        state[name] = torch.stack([stands_for for _, stands_for in written]).transpose(1, 2).contiguous()
    save_file(state, dense / "model.safetensors", {"format": "pt"})
    shutil.copytree(dense, quantized)
    save_file(packed, quantized / "model.safetensors", {"format": "pt"})
    checkpoints.rewrite_config(quantized, quantization_config=CONFIG)
    return quantized


def form_of(experts: Experts) -> WeightFormat:
    return experts._pair[0].scheme.format


def test_gpt_oss(tmp_path: Path) -> None:
    folder = make(tmp_path)
    assert_same_answers(folder)
    model = load(folder)
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    found = form_of(experts)
    assert isinstance(found, Grouped)
    assert found.kind == "e2m1"
    assert read_model_info(folder, {}).quantization["quant_method"] == "mxfp4"
