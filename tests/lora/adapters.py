"""Adapters made, saved and run by the peft library itself: the reference that ours is compared with."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

PROMPT = [5, 17, 3, 44, 8, 29, 61, 12, 90, 33, 7, 2, 55]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make(model: transformers.PreTrainedModel, folder: Path, seed: int = 1, **config: Any) -> Path:
    """Save an adapter with random factors, large enough for its answers to differ."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**{"target_modules": ALL, **config}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.4, generator=generator))
            elif "lora_" in name:
                parameter.normal_(0, 0.2, generator=generator)
    adapted.save_pretrained(folder)
    return folder


def logprobs(model: transformers.PreTrainedModel, folder: Path | None, ids: list[int]) -> torch.Tensor:
    """Of each token of `ids` but the first, as peft runs the adapter: float32 [tokens - 1]."""
    from peft import PeftModel

    ran = model if folder is None else PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()
    with torch.inference_mode():
        logits = ran(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """An adapter of our own, with peft's names. tensors: by what stands between its prefix and ".weight"."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}.weight": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, **config}))
    return folder


def simple(folder: Path, seed: int = 0, hidden: int = 48, scale: float = 0.5, **config: Any) -> Path:
    """Rank 2 on the first layer's q_proj of a model whose heads are as wide as its states."""
    made = torch.Generator().manual_seed(seed)
    q = "model.layers.0.self_attn.q_proj"
    shapes = {f"{q}.lora_A": (2, hidden), f"{q}.lora_B": (hidden, 2)}
    tensors = {name: torch.randn(shape, generator=made) * scale for name, shape in shapes.items()}
    return write(folder, tensors, **{"target_modules": ["self_attn.q_proj"], "layers_to_transform": [0], **config})
