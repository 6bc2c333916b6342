"""Modules that are one matrix in memory and are stored unlike: of other bits, or in plain numbers. Qwen3-Next's and
Qwen 3.5's own fp8 checkpoints are such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.quantization import writers
from tests.quantization.test_floats import fp8_block, fp8_tensor
from tests.quantization.test_integers import assert_same_answers, ct_config, gptq_config
from tests.quantization.writers import awq, gptq, make, pack_quantized


def ct_two(first: dict[str, Any], second: dict[str, Any], target: str) -> dict[str, Any]:
    """Of two, what `target` matches is as the second says."""
    groups = {
        "group_0": {**second["config_groups"]["group_0"], "targets": [target]},
        "group_1": first["config_groups"]["group_0"],
    }
    return {**first, "config_groups": groups}


# Modules that are one matrix here: those that are otherwise, or plain, and what the settings say of it.
UNLIKE_CASES: dict[str, tuple[str, writers.Writer, dict[str, writers.Writer | None], dict[str, Any]]] = {
    "gptq": (
        "Qwen3",
        gptq(4, 32, sort=True),
        {"k_proj": gptq(8, 16), "up_proj": None},
        gptq_config(
            4, 32, desc_act=True,
            dynamic={r"+:.*k_proj": {"bits": 8, "group_size": 16, "desc_act": False}, r"-:.*up_proj": {}},
        ),
    ),
    "awq": (
        "Llama",
        awq(32),
        {"q_proj": None, "up_proj": None},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["q_proj", "up_proj"]},
    ),
    "fp8": (
        "Llama", fp8_tensor(), {"v_proj": None, "gate_proj": None},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["v_proj", "gate_proj"]},
    ),
    "fp8-blocks-experts": (
        "Mixtral", fp8_block("weight_scale_inv", 16, 32), {"w3": None},
        {"quant_method": "fp8", "weight_block_size": [16, 32], "modules_to_not_convert": ["w3", "gate"]},
    ),
    "fp8-qwen3-next": (
        "Qwen3Next", fp8_block("weight_scale_inv", 32, 32), {"in_proj_ba": None},
        {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["in_proj_ba"]},
    ),
    "fp8-qwen3.5": (
        "Qwen3_5Text", fp8_block("weight_scale_inv", 32, 32), {"in_proj_a": None, "in_proj_b": None},
        {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["in_proj_a", "in_proj_b"]},
    ),
    "compressed-tensors": (
        "Qwen3", pack_quantized(4, 32, symmetric=False), {"v_proj": pack_quantized(8, -1)},
        ct_two(ct_config(4, 32, symmetric=False), ct_config(8, -1), "re:.*v_proj"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLIKE_CASES)
def test_modules_of_one_matrix_that_are_stored_unlike(case: str, tmp_path: Path) -> None:
    family, usual, others, config = UNLIKE_CASES[case]

    def writer(module: str) -> writers.Writer | None:
        return others.get(module.rpartition(".")[2], usual)

    assert_same_answers(make(tmp_path, family, writer, config))


LEFT_OUT: dict[str, tuple[writers.Writer, dict[str, Any]]] = {
    "gptq": (gptq(4, 32), {**gptq_config(4, 32), "modules_to_not_convert": ["down_proj", "q_proj"]}),
    "awq": (
        awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["down_proj", "q_proj"]},
    ),
    "fp8": (
        fp8_tensor(),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["down_proj", "k_proj", "q_proj"]},
    ),
    "compressed-tensors": (
        pack_quantized(4, 32),
        {**ct_config(4, 32), "ignore": ["lm_head", "re:.*layers.0.*", "model.layers.1.self_attn.o_proj"]},
    ),
}


@pytest.mark.parametrize(("writer", "config"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_modules_that_settings_leave_out_and_files_do_not(
    writer: writers.Writer, config: dict[str, Any], tmp_path: Path
) -> None:
    """Some of one matrix too."""
    assert_same_answers(make(tmp_path, "Llama", lambda _: writer, config))
