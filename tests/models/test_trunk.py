"""What a decoder's trunk declares besides its layers: what checkpoints call things, what embeddings and logits go
through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quire.config.model_info import read_model_info
from quire.config.pooler import PoolerConfig
from quire.foundation.errors import ConfigError
from quire.models import catalog
from quire.models.base import GivenEmbeddings
from tests.models import checkpoints, sparse_checkpoints
from tests.models.cases import CASES
from tests.models.paged import PagedRows

TOKENS = [5, 17, 60, 3, 96, 41]


def saved(case: str, folder: Path) -> tuple[Any, Path]:
    made, config = CASES[case]
    reference = checkpoints.make(made, **config)
    return reference, checkpoints.save(reference, folder)


def test_names_without_their_prefix_and_masks_are_those_of_gpt2s_first_files(tmp_path: Path) -> None:
    reference, folder = saved("gpt2", tmp_path)
    state = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    save_file({**state, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, folder / "model.safetensors")
    with torch.inference_mode():
        theirs = reference(torch.tensor([TOKENS])).logits[0]
    ours = PagedRows(checkpoints.load(folder)).step([1], [TOKENS])[0]
    assert (ours - theirs).abs().max() <= 1e-4


def test_other_families_are_read_without_their_prefix_too(tmp_path: Path) -> None:
    _, folder = saved("gptj", tmp_path)
    wanted = dict(checkpoints.load(folder).named_parameters())
    state = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in checkpoints.load(folder).named_parameters())


@pytest.mark.parametrize("case", ["gemma", "granite", "minicpm", "opt", "llama"])
def test_given_embeddings_are_those_that_transformers_takes(case: str, tmp_path: Path) -> None:
    """Gemma scales where it looks tokens up, so given ones are as they are; Granite scales whatever comes in."""
    reference, folder = saved(case, tmp_path)
    model = checkpoints.load(folder)
    given = torch.randn(2, 48, generator=torch.Generator().manual_seed(0))
    looked_up = reference.get_input_embeddings()(torch.tensor(TOKENS))
    if case == "minicpm":  # the reference is Granite, which scales both
        given = given / 5
    with torch.inference_mode():
        inputs = looked_up.index_copy(0, torch.tensor([1, 4]), given)
        theirs = reference(inputs_embeds=inputs[None]).logits[0]
        rows = PagedRows(model)
        ctx = rows.context([1], [len(TOKENS)])
        values = given * 5 if case == "minicpm" else given
        embeddings = GivenEmbeddings(torch.tensor([1, 4]), values)
        ours = model.logits(model(torch.tensor(TOKENS, dtype=torch.int32), ctx, given=embeddings))
    assert (ours - theirs).abs().max() <= 1e-4


def test_too_few_learned_positions(tmp_path: Path) -> None:
    _, folder = saved("gpt2", tmp_path)
    info = read_model_info(folder, {})
    with pytest.raises(ConfigError, match="max_model_len must be <= 128 for this model, got 129"):
        catalog.build(info, torch.float32, checkpoints.CPU, 129)


@pytest.mark.parametrize("case", ["gemma2", "cohere", "phi"])
def test_tokens_score_only_where_logits_are_products(case: str, tmp_path: Path) -> None:
    _, folder = saved(case, tmp_path)
    pooler = PoolerConfig(kind="classify", mode=None, activation="sigmoid", size=1, label_tokens=(3, 4))
    info = read_model_info(folder, {})
    with pytest.raises(ConfigError, match="neither scaled nor capped nor have a bias"):
        catalog.build_for_pooling(info, pooler, torch.float32, checkpoints.CPU, 64)


def test_to_warm_up_one_layer_of_each_make_runs(tmp_path: Path) -> None:
    """What keeps the same need not be made alike: the first of DeepSeek's layers has no experts."""
    reference = sparse_checkpoints.make("deepseek2", num_hidden_layers=4)
    model = checkpoints.load(checkpoints.save(reference, tmp_path))
    ran: list[nn.Module] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda layer, _: ran.append(layer))
    with torch.inference_mode():
        ctx = PagedRows(model).context([1], [len(TOKENS)])
        model(torch.tensor(TOKENS, dtype=torch.int32), ctx, layers=1)
    assert ran == [*model.layers[:2]]
