"""Models that ranks share against the same model in one piece: real processes, checkpoints of every family."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.families import families
from tests.distributed import sharded
from tests.models import checkpoints, sparse_checkpoints
from tests.models.cases import CASES as MODELS

ROOT = Path(__file__).parents[2]
# 97 tokens, which no number of ranks divides.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral-window": ("Mistral", {"sliding_window": 7, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"vocab_size": 331}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "vocab_size": 328}),
    "one-kv-head": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: checkpoints.make(family, **config) for name, (family, config) in CASES.items()}
    made |= {f"experts-{name}": sparse_checkpoints.make(name) for name in sparse_checkpoints.SHARED}
    return {name: checkpoints.save(model, tmp_path_factory.mktemp(name)) for name, model in made.items()}


def run(size: int, names: list[str], work: Path) -> list[torch.Tensor]:
    """Logits of each model, as the first of `size` ranks has them."""
    command = [sys.executable, "-m", "tests.distributed.sharded"]
    arguments = [str(work / "meeting"), str(work / "out"), *names]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)
    return torch.load(work / "out0", weights_only=True)  # type: ignore[no-any-return]


EXPERTS = [f"experts-{name}" for name in sparse_checkpoints.SHARED]
FOUR = pytest.param(4, ["qwen2", "one-kv-head"], marks=pytest.mark.long)


@pytest.mark.parametrize(("size", "some"), [(2, list(CASES)), (2, EXPERTS), FOUR])
def test_ranks_compute_what_one_computes(folders: dict[str, Path], size: int, some: list[str], tmp_path: Path) -> None:
    names = [str(folders[name]) for name in some]
    names += [f"{names[0]}=dummy"]
    for name, ours in zip(names, run(size, names, tmp_path), strict=True):
        whole = sharded.logits_of(sharded.load(name))
        assert whole.std() > 0.1, name
        assert (ours - whole).abs().max() <= 1e-4, name


# The main case of each family that ranks may share, with heads enough for two.
SHARED = [name for name, family in families().items() if family.shared and name in MODELS]


@pytest.mark.parametrize(
    "some",
    [["gemma2", "phi3", "gpt2", "bloom"], pytest.param([*SHARED, "glm4", "stablelm-parallel"], marks=pytest.mark.long)],
)
def test_families_of_dense_decoders(some: list[str], tmp_path: Path) -> None:
    """Stacked, by heads, turned round, side by side, normed behind the sum of ranks."""
    folders = [
        str(checkpoints.save(checkpoints.make(made, **config), tmp_path / name))
        for name, (made, config) in MODELS.items()
        if name in some
    ]
    for name, ours in zip(folders, run(2, folders, tmp_path), strict=True):
        whole = sharded.logits_of(sharded.load(name))
        assert whole.std() > 0.1, name
        assert (ours - whole).abs().max() <= 1e-4, name
