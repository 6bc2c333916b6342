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
from quire.config.model_info import read_model_info
from quire.config.parallel.ranks import possible_sizes
from tests.distributed import sharded
from tests.effort import WHOLE
from tests.models import checkpoints, sparse_checkpoints
from tests.models.cases import CASES as MODELS

ROOT = Path(__file__).parents[2]
# Tokens that no number of ranks divides, 97 for the most part.
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "odd-llama": ("Llama", {}),
    "odd-llama-tied-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "odd-mistral-window": ("Mistral", {"sliding_window": 7, "tie_word_embeddings": True}),
    "odd-qwen2": ("Qwen2", {"vocab_size": 331}),
    "odd-qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "vocab_size": 328}),
    "odd-one-kv-head": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True}),
}


def run(size: int, names: list[str], work: Path) -> tuple[list[torch.Tensor], list[bool]]:
    """Logits of each model, as the first of `size` ranks has them; whether its sums can be under way."""
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
        errors = [rank.communicate(timeout=500)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)
    return torch.load(work / "out0", weights_only=True)  # type: ignore[no-any-return]


def compare(size: int, names: list[str], work: Path) -> None:
    logits, take_pieces, normed = run(size, names, work)
    assert all(takes for name, takes in zip(names, take_pieces, strict=True) if "odd-" in name or "olmoe" in name)
    assert all(count >= 5 * 3 for name, count in zip(names, normed, strict=True) if "odd-" in name)  # steps, sums
    for name, ours in zip(names, logits, strict=True):
        whole = sharded.logits_of(sharded.load(name))
        assert whole.std() > 0.1, name
        # Random states decay so slowly that what is summed up in another order shows.
        assert (ours - whole).abs().max() <= (3e-4 if name.endswith("=dummy") else 1e-4), name


# Of every family one case at least; of those with states all that differ in what is cut.
FAMILIES = [name for name in MODELS if name in families() or name.partition("-")[2] in ("biases", "experts", "norms")]
SPARSE = [f"experts-{name}" for name in sparse_checkpoints.CASES]
SHARED = [f"experts-{name}" for name in sparse_checkpoints.SHARED]
SOME = [
    "gemma2", "phi3", "gpt2", "bloom", "olmo2", "cohere-norms", "stablelm-norms", "falcon-new", "mamba2-biases",
    "falcon_h1-scales", "jamba-experts", "minimax-experts", "qwen3_next-experts", "lfm2", "experts-olmoe",
    "gemma3n", "kimi_linear-four", "olmo_hybrid-biases", "zamba2-blocks", *SHARED,
]  # fmt: skip
# One key head, or group of heads, for several ranks.
FEW_HEADS = [
    "gpt_bigcode", "mamba2-few", "bamba-few", "qwen3_next", "experts-olmoe", "experts-minimax_m2", "gemma3n",
    "gemma3n-streams", "kimi_linear-four", "olmo_hybrid-biases", "zamba2-few", "odd-qwen2", "odd-one-kv-head",
]  # fmt: skip
FEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2-few": ("Mamba2", {**MODELS["mamba2"][1], "num_heads": 8, "head_dim": 12, "n_groups": 2}),
    "bamba-few": ("Bamba", {**MODELS["bamba"][1], "mamba_n_heads": 8, "mamba_n_groups": 1}),
    "kimi_linear-four": ("KimiLinear", {**MODELS["kimi_linear-groups"][1], "linear_num_heads": 4}),
    "zamba2-few": ("Zamba2", {**MODELS["zamba2-blocks"][1], "n_mamba_heads": 8, "mamba_ngroups": 1}),
}


@pytest.mark.parametrize(
    ("size", "some"),
    [
        (2, [*ODD, *SOME]),
        pytest.param(4, FEW_HEADS, marks=pytest.mark.long),
        pytest.param(2, [*ODD, *FAMILIES, *FEWER, *SPARSE], marks=pytest.mark.long),
    ],
)
def test_every_family_is_shared(size: int, some: list[str], tmp_path: Path) -> None:
    """Stacked, by heads, turned round, side by side, normed behind the sum of ranks, states, experts: with weights of a
    checkpoint and with random ones. Of the cases whose sizes do not divide it is said before."""
    names = []
    made = MODELS | FEWER | ODD
    for number, name in enumerate(some):
        model = (
            sparse_checkpoints.make(name.removeprefix("experts-"))
            if name.startswith("experts-")
            else checkpoints.make(made[name][0], **made[name][1])
        )
        folder = checkpoints.save(model, tmp_path / name)
        if size in possible_sizes(read_model_info(folder, {})):
            names += [str(folder)] + [f"{folder}=dummy"] * (WHOLE or number % 6 == 0)
    assert len(names) >= len(some)
    compare(size, names, tmp_path)


def test_no_family_is_for_one_rank_alone() -> None:
    assert [name for name, family in families().items() if not family.shared] == []
