"""Families with experts against transformers: same checkpoint, same tokens, same logits, however the tokens come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.foundation.errors import ConfigError, WeightsError
from tests.models import checkpoints, sparse_checkpoints
from tests.models.paged import PagedRows
from tests.models.test_parity import DEVICES, expected, largest_error, random_tokens


@pytest.fixture(scope="module", params=list(sparse_checkpoints.CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    reference = sparse_checkpoints.make(request.param)
    return reference, checkpoints.save(reference, tmp_path_factory.mktemp(request.param))


def test_prompts_in_one_go(pair: tuple[Any, Path]) -> None:
    reference, folder = pair
    tokens = random_tokens(0, [50, 1, 17, 33])
    rows = PagedRows(checkpoints.load(folder))
    order = [1, 0, 2, 3]  # one-token rows first
    ours = rows.step([row + 1 for row in order], [tokens[row] for row in order])
    assert largest_error(ours, [expected(reference, tokens)[row] for row in order]) <= 1e-4


def test_a_prompt_in_chunks_beside_rows_that_decode(pair: tuple[Any, Path]) -> None:
    """16 tokens at a time while two other rows decode; then 32 single tokens of all."""
    reference, folder = pair
    tokens = random_tokens(1, [96, 48, 53])
    rows = PagedRows(checkpoints.load(folder))
    parts: list[list[torch.Tensor]] = [[], *([logits] for logits in rows.step([2, 3], [t[:12] for t in tokens[1:]]))]
    done = [0, 12, 12]
    for step in range(36):
        pieces = [tokens[row][done[row] : done[row] + (16 if row == 0 and step < 4 else 1)] for row in range(3)]
        order = sorted((row for row in range(3) if pieces[row]), key=lambda row: len(pieces[row]) > 1)
        for row, logits in zip(order, rows.step([r + 1 for r in order], [pieces[r] for r in order]), strict=True):
            parts[row].append(logits)
            done[row] += len(pieces[row])
    ours = [torch.cat(part) for part in parts]
    theirs = [logits[: len(part)] for logits, part in zip(expected(reference, tokens), ours, strict=True)]
    assert largest_error(ours, theirs) <= 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_near_the_reference(pair: tuple[Any, Path], device: str) -> None:
    """Where rounding does not send a token elsewhere; most tokens it does not. A prompt, then single tokens."""
    reference, folder = pair
    tokens = random_tokens(3, [60])
    (exact,) = expected(reference, tokens)
    rows = PagedRows(checkpoints.load(folder, torch.bfloat16, torch.device(device)), block_size=16)
    parts = rows.step([1], [tokens[0][:30]]) + [rows.step([1], [[token]])[0] for token in tokens[0][30:]]
    ours = torch.cat(parts)
    errors = (ours - exact).square().mean(-1).sqrt() / exact.square().mean(-1).sqrt()
    assert errors.median() <= 0.1


@pytest.mark.parametrize("case", ["qwen3", "mixtral", "glm"])
def test_experts_stored_in_one_tensor(case: str, tmp_path: Path) -> None:
    """As transformers has them in memory: the same model."""
    reference = sparse_checkpoints.make(case)
    folder = checkpoints.save(reference, tmp_path)
    (ours,) = PagedRows(checkpoints.load(folder)).step([1], random_tokens(4, [20]))
    state = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, folder / "model.safetensors")
    (again,) = PagedRows(checkpoints.load(folder)).step([1], random_tokens(4, [20]))
    assert torch.equal(ours, again)


def test_what_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    folder = checkpoints.save(sparse_checkpoints.make("qwen3"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    tensors["model.layers.2.mlp.experts.0.down_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        checkpoints.load(folder)
    assert "model.layers.1.mlp.experts.5.up_proj.weight [24, 48]" in str(caught.value)
    assert "model.layers.2.mlp.experts.0.down_proj.weight is [3, 3], the model needs [48, 24]" in str(caught.value)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = checkpoints.save(sparse_checkpoints.make("glm"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    more = {
        name.replace("layers.2", "layers.3"): tensor.clone() for name, tensor in tensors.items() if "layers.2" in name
    }
    save_file({**tensors, **more, "model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    checkpoints.load(folder)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be <= num_experts=8"),
    ("qwen3", {"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of layers' numbers"),
    ("qwen3", {"mlp_only_layers": 2}, "mlp_only_layers must be a list of layers' numbers"),
    ("qwen3", {"decoder_sparse_step": 0}, "decoder_sparse_step must be >= 1"),
    ("qwen3", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
    ("qwen3", {"num_experts": 16, "num_local_experts": 8}, "contradicts"),
    ("qwen2", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be >= 1"),
    ("glm", {"n_group": 3}, "n_group=3"),
    ("glm", {"n_group": 8, "topk_group": 8}, "a group needs two experts"),
    ("glm", {"n_group": 4, "topk_group": 1}, "leave no num_experts_per_tok=3"),
    ("olmoe", {"clip_qkv": "much"}, "clip_qkv must be a finite number"),
]


@pytest.mark.parametrize(("case", "changes", "message"), WRONG)
def test_configs_that_cannot_be(case: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = checkpoints.save(sparse_checkpoints.make(case), tmp_path)
    checkpoints.rewrite_config(folder, num_local_experts=None, num_experts=8 if case != "glm" else None)
    checkpoints.rewrite_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        checkpoints.load(folder)


def test_what_tokens_read_of_the_experts(tmp_path: Path) -> None:
    """One token its own share, many all; a token is multiplied by its own experts alone."""
    model = checkpoints.load(checkpoints.save(sparse_checkpoints.make("qwen3"), tmp_path))
    every = sum(p.numel() * 4 for name, p in model.named_parameters() if ".experts." in name)
    assert model.expert_bytes() == every == 3 * 8 * 3 * 24 * 48 * 4
    assert model.expert_bytes(1) == pytest.approx(every * 3 / 8)
    assert every * 0.6 < model.expert_bytes(2) < every * 6 / 8
    assert model.expert_bytes(100) == pytest.approx(every)
    whole = sum(p.numel() for _, p in model.named_parameters())
    assert model.num_weights() == whole - every // 4 * 5 // 8
