"""Encoders that ranks share: the same states, vectors, classes and weights of words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from tests.effort import sampled
from tests.pooling import encoders

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "runner": "pooling", "max_num_seqs": 4,
    "skip_tokenizer_init": True,
}  # fmt: skip
FAMILIES = ["bert", "roberta", "modernbert", "eurobert", "nomic_bert", "jina_embeddings_v3", "distilbert", "gte"]
# Whose heads add numbers of their own by how far apart tokens are, or whose layers are one.
BY_DISTANCE = ["mpnet", "deberta_v2", "deberta_v2-own", "deberta_v2-keys", "albert", "albert-groups"]


def prompts() -> list[dict[str, list[int]]]:
    rng = random.Random(0)
    return [{"prompt_token_ids": [rng.randrange(5, 60) for _ in range(n)]} for n in (9, 1, 24, 17, 30)]


@pytest.mark.parametrize("case", sampled(FAMILIES, lambda case: case == "bert"))
def test_two_ranks_make_the_states_of_one(case: str, tmp_path: Path) -> None:
    compare(case, 2, tmp_path)


@pytest.mark.parametrize("case", sampled(BY_DISTANCE, lambda case: case == "deberta_v2-own"))
def test_terms_of_heads_are_cut_with_them(case: str, tmp_path: Path) -> None:
    compare(case, 2, tmp_path)


@pytest.mark.parametrize("case", sampled(BY_DISTANCE, lambda _: False))
def test_four_ranks(case: str, tmp_path: Path) -> None:
    compare(case, 4, tmp_path)


def compare(case: str, size: int, folder: Path) -> None:
    encoders.make(case, folder)
    found = []
    for ranks in (1, size):
        with LLM(str(folder), **OPTIONS, tensor_parallel_size=ranks) as llm:
            outputs = llm.encode(prompts(), pooling_task="token_embed", use_tqdm=False)
            found.append(np.concatenate([output.outputs.data for output in outputs]))
    assert found[0].std() > 0.01
    assert np.abs(found[0] - found[1]).max() < 1e-4
