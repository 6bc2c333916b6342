"""Quantized checkpoints of wrappers, whose settings name modules as their files do and not as the decoder's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.files.wrappers import decoders_name, files_names
from quire.quantization.methods.compressed_tensors import CompressedTensors
from tests.models import checkpoints
from tests.models.paged import PagedRows
from tests.models.test_wrappers import TOKENS, make
from tests.quantization import test_models
from tests.quantization.test_floats import FLOAT8, fp8, fp8_channel, fp8_tensor, tensors

Ignored = Callable[[list[str]], list[str]]


def ignoring(layer: str, head: str) -> Ignored:
    """Names of a layer's down projection and of the head, by these patterns of what files call them."""
    return lambda names: [
        *(layer.format(name) for name in names if name.endswith("layers.0.mlp.down_proj")),
        *(head.format(name) for name in names if name.endswith("lm_head")),
    ]


BY_OUTPUT = tensors("float-quantized", {**FLOAT8, "strategy": "channel"})
SETTINGS: dict[str, tuple[Any, dict[str, Any], str, Ignored]] = {
    "names": (fp8_tensor, fp8(), "modules_to_not_convert", ignoring("{}", "{}")),
    "patterns": (fp8_channel, BY_OUTPUT, "ignore", ignoring("re:^{}$", "re:^{}$")),
    "whole names": (fp8_channel, BY_OUTPUT, "ignore", ignoring("{}", "{}")),
}  # fmt: skip
SPELLINGS = {
    "as they are": [],
    "older": [("model.language_model.", "language_model.model."), ("lm_head", "language_model.lm_head")],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["Llava", "Mistral3"])
def test_what_a_wrapper_ignores_stays_plain(name: str, settings: str, spelling: str, tmp_path: Path) -> None:
    writer, config, key, ignored = SETTINGS[settings]
    make(name, tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    for old, new in SPELLINGS[spelling]:
        state = {new + tensor.removeprefix(old) if tensor.startswith(old) else tensor: t for tensor, t in state.items()}
    matrices = [tensor.removesuffix(".weight") for tensor in state if _is_matrix(tensor)]
    kept = ignored([*matrices, *(tensor.removesuffix(".weight") for tensor in state if "lm_head" in tensor)])
    assert len(kept) == 2, "the head and one matrix"
    packed, dense = dict(state), dict(state)
    write = writer() if writer is fp8_tensor else writer(1)
    for module in matrices:
        if module.endswith("layers.0.mlp.down_proj"):
            continue
        made, dense[f"{module}.weight"] = write(state[f"{module}.weight"].float())
        packed |= {f"{module}.{part}": value.contiguous() for part, value in made.items()}
    save_file({tensor: value.contiguous() for tensor, value in dense.items()}, file)
    plain = logits(tmp_path)
    save_file({tensor: value.contiguous() for tensor, value in packed.items()}, file)
    checkpoints.rewrite_config(tmp_path, quantization_config={**config, key: kept})
    assert (logits(tmp_path) - plain).abs().max() <= 1e-4


def _is_matrix(tensor: str) -> bool:
    known = decoders_name(tensor)
    return known is not None and "layers." in known and "_proj.weight" in known


def logits(folder: Path) -> torch.Tensor:
    model = test_models.build(folder, unused=CompressedTensors.unused)
    return PagedRows(model, max_rows=1).step([1], [TOKENS[:20]])[0]


def test_names_go_there_and_back() -> None:
    for module in ("model.layers.3.mlp.down_proj", "lm_head", "model.norm"):
        for name in files_names(module):
            assert decoders_name(f"{name}.weight") == f"{module}.weight"
