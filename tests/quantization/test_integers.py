"""Checkpoints of grouped integers: GPTQ, AWQ, AutoRound, compressed-tensors. Each stands for a plain model, and gives
that model's log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.model_info import read_model_info
from quire.models import catalog, weights
from quire.models.base import DecoderStack
from quire.quantization.select import make_method
from tests.models import checkpoints
from tests.models.paged import PagedRows
from tests.quantization import writers
from tests.quantization.writers import awq, gptq, integer_bytes, make, pack_quantized

IDS = [[3, 17, 55, 8, 90, 41, 2, 66, 30], [7, 7, 12, 80]]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderStack:
    info = read_model_info(folder, {})
    method = make_method(info.quantization.get("quant_method"), info.quantization)
    model = catalog.build(info, dtype, checkpoints.CPU, info.max_position, method)
    weights.load(model, folder, "auto", unused=method.unused, renamed=method.renamed)
    return model


def assert_same_answers(folder: Path) -> None:
    """folder: of `writers.make`."""
    ours = PagedRows(load(folder)).step([1, 2], IDS)
    theirs = writers.reference(folder.parent)
    for ids, logits in zip(IDS, ours, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0]
        assert (logits.log_softmax(-1) - expected.log_softmax(-1)).abs().max() <= 1e-4


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


GPTQ_CASES = {
    "4": ("Llama", gptq(4, 32), gptq_config(4, 32)),
    "4-whole": ("Qwen3", gptq(4, -1), gptq_config(4, -1)),
    "4-zeros": ("Qwen3", gptq(4, 16, symmetric=False), gptq_config(4, 16, sym=False)),
    "4-sorted": ("Llama", gptq(4, 32, sort=True), gptq_config(4, 32, desc_act=True)),
    "4-sorted-zeros-v2": (
        "Qwen3",
        gptq(4, 32, symmetric=False, sort=True, older=False),
        gptq_config(4, 32, desc_act=True, sym=False, checkpoint_format="gptq_v2"),
    ),
    "3-zeros": ("Llama", gptq(3, 32, symmetric=False), gptq_config(3, 32, sym=False)),
    "3": ("Llama", gptq(3, 32), gptq_config(3, 32)),
    "2-zeros": ("Llama", gptq(2, 16, symmetric=False), gptq_config(2, 16, sym=False)),
    "8": ("Llama", gptq(8, 32), gptq_config(8, 32)),
    "8-zeros": ("Qwen3", gptq(8, 32, symmetric=False), gptq_config(8, 32, sym=False)),
    "mixtral": ("Mixtral", gptq(4, 32), gptq_config(4, 32)),
    "mixtral-sorted": ("Mixtral", gptq(4, 32, sort=True), gptq_config(4, 32, desc_act=True)),
}


@pytest.mark.parametrize(("family", "writer", "config"), GPTQ_CASES.values(), ids=GPTQ_CASES)
def test_gptq(family: str, writer: writers.Writer, config: dict[str, Any], tmp_path: Path) -> None:
    assert_same_answers(make(tmp_path, family, lambda _: writer, config))


def test_gptq_rules_for_modules(tmp_path: Path) -> None:
    """The first pattern that a module's name begins with: other bits, or none."""

    def writer(module: str) -> writers.Writer | None:
        if "layers.0.self_attn" in module:
            return None
        return gptq(8, 16) if "down_proj" in module else gptq(4, 32)

    rules = {r"-:.*layers\.0\.self_attn": {}, r"+:.*down_proj": {"bits": 8, "group_size": 16}}
    assert_same_answers(make(tmp_path, "Llama", writer, gptq_config(4, 32, dynamic=rules)))


def ct_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    args = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, **more}
    if group == -1:
        args |= {"strategy": "channel", "group_size": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": None}},
        "ignore": ["lm_head", "re:.*block_sparse_moe.gate$"],
    }  # fmt: skip


AWQ_CASES = {
    "llama": ("Llama", awq(32), {}),
    "qwen3-whole": ("Qwen3", awq(-1), {"group_size": -1}),
    "no-zeros": ("Llama", awq(32, zeros=False), {"zero_point": False}),
    "mixtral": ("Mixtral", awq(32), {"modules_to_not_convert": ["gate"]}),
}


@pytest.mark.parametrize(("family", "writer", "more"), AWQ_CASES.values(), ids=AWQ_CASES)
def test_awq(family: str, writer: writers.Writer, more: dict[str, Any], tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", **more}
    assert_same_answers(make(tmp_path, family, lambda _: writer, config))


def test_autoround(tmp_path: Path) -> None:
    def writer(module: str) -> writers.Writer | None:
        if "o_proj" in module:
            return None
        return gptq(8, 32) if "layers.1.mlp.down_proj" in module else gptq(4, 32)

    own = {f"model.layers.{layer}.self_attn.o_proj": {"bits": 16} for layer in range(2)}
    own["model.layers.1.mlp.down_proj"] = {"bits": 8}
    config = {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int", "iters": 200,
        "packing_format": "auto_round:auto_gptq", "extra_config": own, "block_name_to_quantize": "model.layers",
    }  # fmt: skip
    assert_same_answers(make(tmp_path, "Llama", writer, config))


PACKED_CASES = {
    "4": ("Llama", pack_quantized(4, 32), ct_config(4, 32)),
    "4-channel": ("Qwen3", pack_quantized(4, -1), ct_config(4, -1)),
    "4-zeros": ("Llama", pack_quantized(4, 32, symmetric=False), ct_config(4, 32, symmetric=False)),
    "4-sorted": ("Llama", pack_quantized(4, 32, sort=True), ct_config(4, 32, actorder="group")),
    **{f"{bits}": ("Qwen3", pack_quantized(bits, 32), ct_config(bits, 32)) for bits in (2, 3, 5, 6, 7, 8)},
    "3-zeros": ("Qwen3", pack_quantized(3, 32, symmetric=False), ct_config(3, 32, symmetric=False)),
    "6-zeros": ("Llama", pack_quantized(6, -1, symmetric=False), ct_config(6, -1, symmetric=False)),
    "8-channel-zeros": ("Llama", pack_quantized(8, -1, symmetric=False), ct_config(8, -1, symmetric=False)),
    "mixtral": ("Mixtral", pack_quantized(4, 32), ct_config(4, 32)),
}


@pytest.mark.parametrize(("family", "writer", "config"), PACKED_CASES.values(), ids=PACKED_CASES)
def test_packed_integers(family: str, writer: writers.Writer, config: dict[str, Any], tmp_path: Path) -> None:
    assert_same_answers(make(tmp_path, family, lambda _: writer, config))


def in_bytes(bits: int, group: int, symmetric: bool = True) -> dict[str, Any]:
    """With activations that are rounded in the checkpoint's own scheme, and here only where weights are of 8 bits."""
    config = ct_config(bits, group, symmetric=symmetric)
    (args,) = config["config_groups"].values()
    if group == 0:
        args["weights"] |= {"strategy": "tensor", "group_size": None}
    args["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    return {**config, "format": "int-quantized"}


BYTES_CASES = {
    "w4a8": ("Llama", integer_bytes(4, 32), in_bytes(4, 32)),
    "w4a8-zeros": ("Qwen3", integer_bytes(4, 32, symmetric=False), in_bytes(4, 32, symmetric=False)),
    "w4a8-mixtral": ("Mixtral", integer_bytes(4, 32), in_bytes(4, 32)),
    "w3a8-channel": ("Llama", integer_bytes(3, -1), in_bytes(3, -1)),
    "w6a8": ("Llama", integer_bytes(6, 16), in_bytes(6, 16)),
    "w8a8-groups": ("Qwen3", integer_bytes(8, 32), in_bytes(8, 32)),
    "w8a8-zeros": ("Llama", integer_bytes(8, -1, symmetric=False), in_bytes(8, -1, symmetric=False)),
    "w8a8-tensor-zeros": ("Llama", integer_bytes(8, 0, symmetric=False), in_bytes(8, 0, symmetric=False)),
}


@pytest.mark.parametrize(("family", "writer", "config"), BYTES_CASES.values(), ids=BYTES_CASES)
def test_integers_in_bytes(family: str, writer: writers.Writer, config: dict[str, Any], tmp_path: Path) -> None:
    assert_same_answers(make(tmp_path, family, lambda _: writer, config))


def test_through_the_engine(tmp_path: Path) -> None:
    """What the worker does with such a folder: the same tokens as the plain model's, and no option needed."""
    folder = make(tmp_path, "Llama", lambda _: pack_quantized(4, 32), ct_config(4, 32))
    prompts = [{"prompt_token_ids": ids} for ids in IDS]
    texts = []
    for path in (folder, tmp_path / "dense"):
        with LLM(str(path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64) as llm:
            found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in found])
    assert texts[0] == texts[1]
