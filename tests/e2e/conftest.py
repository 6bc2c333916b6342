"""Tiny random models on disk, and what Hugging Face transformers answers with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 199


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 2 layers in float32, weights large enough that greedy decoding does not settle on one token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=0,
        initializer_range=0.4,
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


class Reference:
    """Greedy decoding by transformers, one prompt at a time, remembered."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        import torch

        known = self._known.get(tuple(prompt), [])
        if len(known) < count:
            with torch.inference_mode():
                out = self._model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            known = out[0, len(prompt) :].tolist()
            self._known[tuple(prompt)] = known
        return known[:count]


@pytest.fixture(scope="session")
def reference(tiny_qwen3: Path) -> Reference:
    return Reference(tiny_qwen3)
