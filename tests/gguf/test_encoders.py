"""Encoders in GGUF files, written by the format's library: states and vectors of the model that the files stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from quire import LLM, PoolingParams
from quire.foundation.errors import ConfigError
from tests.gguf import writer
from tests.pooling import encoders
from tests.pooling.checkpoints import SPECIAL, WORDS, random_prompts, sentence_transformers

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 100, "max_model_len": 64,
}  # fmt: skip
GIVEN = [{"prompt_token_ids": prompt} for prompt in random_prompts(0, [33, 1, 17])]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))


def written(folder: Path, file: Path, kind: Type = Type.Q8_0, arch: str = "bert", **more: Any) -> Any:
    """Both stand for the same numbers, in the end. Returns transformers' model with them."""
    folder.mkdir()
    model = encoders.make(arch.replace("-", "_"), folder, hidden_size=64, intermediate_size=96)
    vocabulary = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": SPECIAL + WORDS,
        "tokenizer.huggingface.json": (folder / "tokenizer.json").read_text(),
    }  # fmt: skip
    state = writer.write(folder, file, arch, lambda _: kind, tokenizer=vocabulary, more=more)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("arch", ["bert", "nomic-bert"])
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.F16], ids=str)
def test_states_are_those_of_the_dequantised_model(kind: Type, arch: str, tmp_path: Path) -> None:
    model = written(tmp_path / "plain", tmp_path / "model.gguf", kind, arch)
    with LLM(str(tmp_path / "model.gguf"), **OPTIONS) as llm:
        outputs = llm.encode(GIVEN, PoolingParams(use_activation=False), pooling_task="token_embed", use_tqdm=False)
    for given, output in zip(GIVEN, outputs, strict=True):
        expected = encoders.states(model, given["prompt_token_ids"])
        assert expected.std() > 0.05
        assert (torch.tensor(output.outputs.data) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("number", "mode"), [(1, "mean_tokens"), (2, "cls_token"), (3, "lasttoken")])
def test_vectors_are_made_as_the_file_says(number: int, mode: str, tmp_path: Path) -> None:
    written(tmp_path / "plain", tmp_path / "model.gguf", pooling_type=number)
    sentence_transformers(tmp_path / "plain", "Pooling", "Normalize", **{f"pooling_mode_{mode}": True})
    vectors = []
    for model in (tmp_path / "model.gguf", tmp_path / "plain"):
        with LLM(str(model), **OPTIONS) as llm:
            vectors.append(torch.tensor([output.outputs.embedding for output in llm.embed(GIVEN, use_tqdm=False)]))
    assert (vectors[0] - vectors[1]).abs().max() < 1e-5


def test_rerankers_are_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path / "plain", tmp_path / "model.gguf", pooling_type=4)
    with pytest.raises(ConfigError, match=r"not supported: bert\.pooling_type=4"):
        LLM(str(tmp_path / "model.gguf"), **OPTIONS)
