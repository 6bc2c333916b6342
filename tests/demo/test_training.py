"""The training model is Hugging Face's Qwen3, packing keeps documents apart, the schedule ends at zero."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from demo import corpus, packing
from demo.model import ModelConfig, Qwen3
from demo.train import learning_rate, save, to_device

MODEL = Path(__file__).parents[2] / "quire" / "demo_model"
TINY = ModelConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def batch(tokenizer: Tokenizer) -> packing.Batch:
    return next(packing.batches(tokenizer, 768, Random(3)))


def test_packed_logits_are_those_of_transformers(tokenizer: Tokenizer, batch: packing.Batch, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = Qwen3(TINY, torch.float32)
    with torch.no_grad():  # so that saving in bf16 changes nothing
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    save(model, tokenizer, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids, _, _, places = to_device(batch, torch.device("cpu"))
    with torch.no_grad():
        logits = F.linear(model.hidden(ids, places), model.model["embed_tokens"].weight)
        for start, end in zip(batch.starts[:3], batch.starts[1:4], strict=True):
            torch.testing.assert_close(logits[start:end], reference(ids[None, start:end]).logits[0])


def test_batches_have_one_shape_and_aligned_targets(batch: packing.Batch) -> None:
    assert len(batch.ids) == len(batch.targets) == len(batch.weights) == len(batch.positions) == 768
    assert len(batch.starts) == packing.MAX_DOCUMENTS + 1
    assert batch.starts[-1] == 768
    assert np.array_equal(batch.targets[:-1], batch.ids[1:])
    ends = batch.starts[1:][np.diff(batch.starts) > 0] - 1
    assert not batch.weights[ends].any()  # nothing is predicted across documents
    assert not batch.positions[batch.starts[batch.starts < 768]].any()


def test_answers_weigh_more_than_prompts(tokenizer: Tokenizer) -> None:
    rng = Random(6)
    document = corpus.document(rng)
    while not any(segment.role == "history" for segment in document):
        document = corpus.document(rng)
    (ids, weights), *_ = packing.encode(tokenizer, [document])
    at = 0
    for segment in document:
        part = weights[at : at + len(tokenizer.encode(segment.text).ids)]
        at += len(part)
        if segment.role == "prompt":
            assert set(part) <= {packing.CONTEXT_WEIGHT}
        else:
            assert part[0] == (0.0 if segment.role == "history" else 1.0)
            assert set(part[1:]) == {1.0}
    assert at == len(ids)


def test_learning_rate_rises_stays_and_falls() -> None:
    assert learning_rate(1.0, 0, 10, 0.0, 0.5) == pytest.approx(0.1)
    assert learning_rate(1.0, 99, 10, 0.4, 0.5) == 1.0
    assert learning_rate(1.0, 99, 10, 0.75, 0.5) == pytest.approx(0.5)
    assert learning_rate(1.0, 99, 10, 1.0, 0.5) == 0.0
