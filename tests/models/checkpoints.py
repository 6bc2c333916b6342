"""Tiny random models made and saved by Hugging Face transformers: the reference that ours is compared with."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.config.model_info import read_model_info
from quire.models import catalog, weights
from quire.models.base import Decoder
from tests.models import twins

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Families whose class is called otherwise, and those whose norms are added to 1.
MODELS = {
    "Gemma3Text": "Gemma3ForCausalLM", "Gemma3nText": "Gemma3nForCausalLM", "Llama4Text": "Llama4ForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "CTRL": "CTRLLMHeadModel", "Qwen3_5Text": "Qwen3_5ForCausalLM", "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
}  # fmt: skip
ADDED_TO_1 = ("Gemma", "Gemma2", "Gemma3Text", "VaultGemma", "Nemotron", "Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText")


def config_class(family: str) -> type[transformers.PreTrainedConfig]:
    found: type[transformers.PreTrainedConfig] = getattr(transformers, f"{family}Config")
    return found


def class_name(family: str) -> str:
    return MODELS.get(family, f"{family}ForCausalLM")


def make(family: str, seed: int = 0, **config: Any) -> transformers.PreTrainedModel:
    """A float32 model with weights large enough for its outputs to depend on everything before. family: transformers'
    name, and behind a colon what `save` turns the checkpoint into. config: `...` leaves a key out."""
    family, _, turned = family.partition(":")
    attention = config.pop("_attn_implementation", "eager")
    wanted = {key: value for key, value in {**TINY, **TOKENS, **config}.items() if value is not ...}
    made = config_class(family)(**copy.deepcopy(wanted))  # which fills in what a rotary section lacks
    made._attn_implementation = attention
    torch.manual_seed(seed)
    model = getattr(transformers, class_name(family))(made).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5).sub_(1 if family in ADDED_TO_1 else 0)
            else:
                parameter.normal_(0, 0.15)
    model.tie_weights()
    model.saved_as = turned
    return twins.computing(turned, model)


def reload(reference: transformers.PreTrainedModel, folder: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The same in another type, by way of a file."""
    reference.save_pretrained(folder)
    again = type(reference).from_pretrained(
        folder, dtype=dtype, attn_implementation=reference.config._attn_implementation
    )
    again.load_state_dict(reference.state_dict())  # some classes clear the padding token's row while they load
    return twins.computing(reference.saved_as, again)


def save(model: transformers.PreTrainedModel, folder: Path, **arguments: Any) -> Path:
    model.save_pretrained(folder, **arguments)
    if model.config.model_type == "olmo_hybrid":
        _cut_convolutions(model, folder)
    if getattr(model, "saved_as", ""):
        twins.turn(model.saved_as, folder)
    return folder


def _cut_convolutions(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Queries', keys' and values', which transformers cuts into three alike however many channels each has."""
    file = folder / "model.safetensors"
    state = load_file(file)
    for name, module in model.named_modules():
        if hasattr(module, "conv1d"):
            parts = module.conv1d.weight.data.split([module.key_dim, module.key_dim, module.value_dim])
            state |= {f"{name}.{which}_conv1d.weight": part.clone() for which, part in zip("qkv", parts, strict=True)}
    save_file(state, file)


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    impl: str = "auto",
    trusted: bool = False,
    **overrides: Any,
) -> Decoder:
    """Through the same doors as the worker."""
    info = read_model_info(folder, overrides, impl=impl, trusted=trusted)
    model = catalog.build(info, dtype, device, info.max_position)
    weights.load(model, folder, "auto")
    model.check()
    return model


def rewrite_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
