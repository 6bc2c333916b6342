"""The same vectors from a GPU: encoders through both attention backends, decoders in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

LENGTHS = [1, 33, 2, 64, 17, 17, 5, 40, 33, 9, 3, 64] * 3
TOLERANCE = {"float32": 2e-3, "float16": 2e-2}


def embed(folder: Path, prompts: list[list[int]], **options: Any) -> Any:
    from quire import LLM, PoolingParams

    with LLM(str(folder), device="cuda", **options) as llm:
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.encode(given, PoolingParams(use_activation=False), use_tqdm=False)
        return torch.stack([torch.tensor(output.outputs.data) for output in outputs])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_encoders(backend: str, dtype: str, tmp_path: Path) -> None:
    from tests.pooling import checkpoints

    model = checkpoints.make("XLMRobertaModel", tmp_path)
    checkpoints.sentence_transformers(tmp_path, "Pooling", pooling_mode="mean")
    prompts = checkpoints.random_prompts(0, LENGTHS)
    ours = embed(tmp_path, prompts, dtype=dtype, attention_backend=backend, max_num_seqs=8, max_num_batched_tokens=200)
    theirs = torch.stack([checkpoints.states(model, prompt).mean(0) for prompt in prompts])
    assert (ours - theirs).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize(
    "case", ["modernbert", "modernbert-kinds", "eurobert", "nomic_bert", "gte", "jina_embeddings_v3"]
)
def test_encoders_of_decoders_layers(case: str, backend: str, dtype: str, tmp_path: Path) -> None:
    """Rotations, windows to either side, keys and values in scratch memory."""
    from tests.pooling import checkpoints, encoders

    model = encoders.make(case, tmp_path)
    checkpoints.sentence_transformers(tmp_path, "Pooling", pooling_mode="mean")
    prompts = checkpoints.random_prompts(0, LENGTHS)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 200, "max_model_len": 64}
    ours = embed(tmp_path, prompts, dtype=dtype, attention_backend=backend, **options)
    theirs = torch.stack([encoders.states(model, prompt).mean(0) for prompt in prompts])
    assert (ours - theirs).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_queries_filled_up_with_masks(backend: str, tmp_path: Path) -> None:
    """Keys that nobody sees, on a GPU as on a CPU."""
    import json

    from quire import LLM
    from tests.pooling import checkpoints, encoders

    encoders.make("bert", tmp_path)
    linear = torch.nn.Linear(48, 16)
    checkpoints.sentence_transformers(
        tmp_path, "Dense", dense=[linear], kinds="pylate.models.Dense", activation="Identity"
    )
    config = {"query_prefix": "w41", "document_prefix": "w42", "query_length": 40}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"mask_token": "w43"}')
    scores = []
    for device in ("cpu", "cuda"):
        chosen = backend if device == "cuda" else "sdpa"
        with LLM(str(tmp_path), device=device, dtype="float32", attention_backend=chosen) as llm:
            made = llm.score(["w1 w2", "w3"], ["w4 w1", "w5 w6 w7"], use_tqdm=False)
            scores.append([one.outputs.score for one in made])
    assert scores[1] == pytest.approx(scores[0], abs=5e-2)


@pytest.mark.parametrize("mode", ["mean", "max", "cls", "lasttoken"])
def test_decoders_in_chunks(mode: str, tmp_path: Path) -> None:
    from tests.pooling import checkpoints
    from tests.pooling.test_parity import POOL

    model = checkpoints.make("Qwen3ForCausalLM", tmp_path, head_dim=16)
    checkpoints.sentence_transformers(tmp_path, "Pooling", pooling_mode=mode)
    prompts = checkpoints.random_prompts(0, LENGTHS)
    ours = embed(tmp_path, prompts, dtype="float32", max_prefill_chunk=11, max_num_seqs=8, max_num_batched_tokens=40)
    names = {"mean": "mean_tokens", "max": "max_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    theirs = torch.stack([POOL[names[mode]](checkpoints.states(model, prompt)) for prompt in prompts])
    assert (ours - theirs).abs().max() < TOLERANCE["float32"]
