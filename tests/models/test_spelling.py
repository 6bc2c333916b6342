"""Checkpoints whose names training tools have lengthened or cut give the same model; what is ambiguous is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.foundation.errors import WeightsError
from tests.models import checkpoints

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
SPELLED: dict[str, Callable[[str], str]] = {
    "doubled": lambda name: name if name.startswith("lm_head") else f"model.{name}",
    "doubled with the head": lambda name: f"model.{name}",
    "DDP": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "peft": lambda name: f"base_model.model.{name}",
    "checkpointed": lambda name: re.sub(r"(layers\.\d\.)", r"\1_checkpoint_wrapped_module.", name),
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}".replace(".mlp.", ".mlp._fsdp_wrapped_module."),
    "none": lambda name: name.removeprefix("model."),
}


def renamed(folder: Path, spell: Callable[[str], str]) -> None:
    file = folder / "model.safetensors"
    save_file({spell(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


@pytest.mark.parametrize("how", SPELLED)
@pytest.mark.parametrize(
    ("family", "sizes"), [("Llama", {}), ("Llama", {"tie_word_embeddings": True}), ("Qwen3Moe", MIXTURE)], ids=str
)
def test_the_same_model(how: str, family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make(family, **sizes), tmp_path)
    wanted = dict(checkpoints.load(folder).named_parameters())
    renamed(folder, SPELLED[how])
    for name, parameter in checkpoints.load(folder).named_parameters():
        assert torch.equal(parameter, wanted[name]), name


def test_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoints.save(checkpoints.make("Llama"), tmp_path)
    with caplog.at_level("INFO"):
        checkpoints.load(folder)
        assert "names of tensors" not in caplog.text
        renamed(folder, lambda name: f"module.{name}".replace("self_attn", "_orig_mod.self_attn"))
        checkpoints.load(folder)
    said = f"names of tensors in {folder} begin with 'module.' and hold what wrapped modules, and are read without that"
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize("also", ["", "other."])
def test_several_prefixes_are_nobodys(also: str, tmp_path: Path) -> None:
    """One with the usual names beside another model's; and two of which neither has them."""
    folder = checkpoints.save(checkpoints.make("Llama"), tmp_path)
    file = folder / "model.safetensors"
    state = load_file(file)
    both = {f"{also}{name}": tensor for name, tensor in state.items()}
    both |= {f"draft.{name}": tensor.clone() for name, tensor in state.items()}
    save_file(both, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"no place for:\n *draft\.lm_head\.weight"):
        checkpoints.load(folder)
