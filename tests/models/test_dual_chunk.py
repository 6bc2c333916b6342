"""Dual chunk attention (Qwen2.5-1M) against its formula, written down once more: products of queries and keys at their
positions, each pair by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.config.model_info import read_model_info
from quire.config.resolve import resolve
from quire.foundation.errors import ConfigError
from tests.effort import sampled
from tests.models import checkpoints
from tests.models.test_families import STEPS, VOCAB, largest_error
from tests.models.test_parity import random_tokens

TOLD = {"chunk_size": 24, "local_size": 8, "original_max_position_embeddings": 24}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "qwen2": ("Qwen2", {}, TOLD),
    "far": ("Qwen2", {}, {"chunk_size": 40, "local_size": 30, "original_max_position_embeddings": 1000}),
    "near": ("Qwen2", {}, {"chunk_size": 17, "local_size": 0, "original_max_position_embeddings": 5}),
    "qwen3": ("Qwen3", {"head_dim": 16}, TOLD),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                               "shared_expert_intermediate_size": 40}, TOLD),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 24}, TOLD),
}  # fmt: skip
WAYS: list[dict[str, Any]] = [
    {}, {"max_prefill_chunk": 13}, {"attention_backend": "sdpa", "max_prefill_chunk": 7},
]  # fmt: skip


def turned(x: torch.Tensor, position: torch.Tensor, theta: float) -> torch.Tensor:
    """x [..., dim] at positions of the same leading shape (Su et al., 2021, halves paired)."""
    half = x.shape[-1] // 2
    angle = position[..., None] * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def dual_chunks(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, None]:
    """q [1, heads, tokens, dim], k, v [1, kv_heads, tokens, dim], neither at any position."""
    told, theta = module.config.told, module.config.rope_parameters["rope_theta"]
    chunk = told["chunk_size"] - told["local_size"]
    k, v = (x[0].double().repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (k, v))
    q, i = q[0].double(), torch.arange(q.shape[2])
    keys, here = turned(k, (i % chunk).expand(k.shape[:2]), theta), i % chunk
    at = [  # where a query is to keys of its own chunk, of the one before, of all others
        here,
        (here + chunk).clamp(max=told["chunk_size"]),
        torch.full_like(here, min(2 * chunk - 1, told["chunk_size"])),
    ]
    every = [turned(q, where.expand(q.shape[:2]), theta) @ keys.transpose(1, 2) for where in at]
    behind = i[:, None] // chunk - i // chunk
    scores = torch.where(behind == 0, every[0], torch.where(behind == 1, every[1], every[2]))
    scores = scores.masked_fill(i > i[:, None], -torch.inf)
    length = (1 + 0.1 * ((i + 1) / told["original_max_position_embeddings"]).log()).clamp(min=1)
    weights = (scores * length[:, None] * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).transpose(0, 1)[None].float(), None


def reference(case: str) -> Any:
    """transformers' model, whose queries and keys all stay at position 0 until the formula has turned them."""
    made, config, told = CASES[case]
    model = checkpoints.make(made, **config)
    AttentionInterface.register("dual_chunks", dual_chunks)
    model.config.told = told
    model.set_attn_implementation("dual_chunks")
    forward = model.forward
    model.forward = lambda ids: forward(ids, position_ids=torch.zeros_like(ids))
    return model


def saved(case: str, folder: Path) -> Path:
    made, config, told = CASES[case]
    checkpoints.save(checkpoints.make(made, **config), folder)
    checkpoints.rewrite_config(folder, dual_chunk_attention_config=told)
    return folder


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("case", sampled(list(CASES), lambda case: case in ("qwen2", "far")))
def test_texts_of_many_chunks(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Prompts whole and in parts, decode steps, and what the prefix cache has of it."""
    usual: dict[str, Any] = {
        "device": "cpu", "num_threads": 1, "dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True,
        "max_logprobs": VOCAB,
    }  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, detokenize=False, logprobs=VOCAB)
    wanted = [{"prompt_token_ids": prompt} for prompt in random_tokens(11, [60, 3, 16, 37])]
    with LLM(str(saved(case, tmp_path)), **usual, **options) as llm:
        answers = llm.generate(wanted, params, use_tqdm=False)
        again = llm.generate(wanted, params, use_tqdm=False)
    assert again[0].num_cached_tokens > 0
    model = reference(case)
    assert largest_error(model, answers) <= 1e-4
    assert [answer.outputs[0].token_ids for answer in again] == [answer.outputs[0].token_ids for answer in answers]


def test_the_context_is_that_of_kernels_unless_more_is_asked_for(tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path)
    info = read_model_info(folder, {})
    assert (info.usual_context, info.max_position) == (16, 128)
    found = resolve(EngineConfig.from_flat(model=str(folder), device="cpu"))
    assert found.max_model_len == 16
    assert any("max_model_len=16: the first chunk" in note for note in found.notes)
    assert resolve(EngineConfig.from_flat(model=str(folder), device="cpu", max_model_len=100)).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len=129 is more than the model's 128 positions"):
        resolve(EngineConfig.from_flat(model=str(folder), device="cpu", max_model_len=129))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dual_chunk_attention_config": {**TOLD, "local_size": 24}}, "local_size=24 must be < chunk_size=24"),
        ({"dual_chunk_attention_config": {**TOLD, "sparse_attention_config": {}}}, "sparse attention is not supported"),
        ({"dual_chunk_attention_config": 7}, "dual_chunk_attention_config must be an object"),
        (
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "layer_types": None},
            "does not go with windows",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    checkpoints.rewrite_config(saved("qwen2", tmp_path), **changes)
    with pytest.raises(ConfigError, match=words):
        LLM(str(tmp_path), device="cpu", num_threads=1, skip_tokenizer_init=True, max_model_len=100)
