"""Prompts as embeddings: what transformers answers to them, however the work is cut; and what is no such prompt."""

from __future__ import annotations

import base64
import io
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from quire import LLM, SamplingParams
from quire.foundation.errors import InputError
from quire.frontend import prompt_embeds
from tests.e2e.conftest import Reference
from tests.e2e.test_greedy_equals_transformers import prompts

HIDDEN, TOKENS = 64, 12
ENGINE: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 128, "skip_tokenizer_init": True}
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


class Model:
    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def embeds(self, ids: list[int]) -> torch.Tensor:
        return self.model.get_input_embeddings()(torch.tensor(ids)).detach()

    def greedy(self, embeds: torch.Tensor) -> list[int]:
        with torch.inference_mode():
            out = self.model.generate(
                inputs_embeds=embeds[None], attention_mask=torch.ones(1, len(embeds), dtype=torch.long),
                do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return [int(token) for token in out[0]]


@pytest.fixture(scope="module")
def model(tiny_qwen3: Path) -> Model:
    return Model(tiny_qwen3)


def tokens(llm: LLM, given: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(given, params, use_tqdm=False)
    assert llm.call("check") is None
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"async_scheduling": True, "max_prefill_chunk": 16},
        {"async_scheduling": True, "preempt_every_step": True},
        pytest.param(
            {"distributed_executor_backend": "mp", "max_num_batched_tokens": 48, "max_num_seqs": 16},
            marks=pytest.mark.long,
        ),
        pytest.param({"device": "cuda", "dtype": "float32"}, marks=pytest.mark.gpu),
    ],
    ids=["depth 1", "chunks", "preempted", "worker process", "GPU"],
)
def test_what_transformers_answers(
    tiny_qwen3: Path, model: Model, reference: Reference, options: dict[str, Any]
) -> None:
    """Noise that is no token's embedding, beside prompts of ids."""
    rng = torch.Generator().manual_seed(3)
    ids = prompts(6, seed=51, longest=60)
    noise = [torch.randn(len(one), HIDDEN, generator=rng) * 0.4 for one in ids]
    expected = [model.greedy(one) for one in noise]
    with LLM(str(tiny_qwen3), enable_prompt_embeds=True, **{**ENGINE, **options}) as llm:
        mixed = [part for one, other in zip(noise, ids, strict=True) for part in ({"prompt_embeds": one}, other)]
        found = tokens(llm, mixed)
    assert found[0::2] == expected
    assert found[1::2] == [reference.greedy(one, TOKENS) for one in ids]


def test_the_cache_knows_embeddings_by_their_content(tiny_qwen3: Path, model: Model) -> None:
    ids = prompts(1, seed=52)[0] * 40
    real = model.embeds(ids[:60])
    other = real.clone()
    other[3, 7] += 1.0
    params = GREEDY.clone(n=1)
    with LLM(str(tiny_qwen3), enable_prompt_embeds=True, **ENGINE) as llm:
        given = [{"prompt_embeds": real}, {"prompt_embeds": other}, [0] * 60, ids[:60]]
        first = llm.generate(given, params, use_tqdm=False)
        again = llm.generate([given[0], given[1], {"prompt_embeds": real.numpy()}], params, use_tqdm=False)
    assert [output.num_cached_tokens for output in first] == [0, 0, 0, 0]
    assert [output.num_cached_tokens for output in again] == [48, 48, 48]
    answers = [output.outputs[0].token_ids for output in first]
    assert answers[0] == answers[3] == model.greedy(real)
    assert answers[1] == model.greedy(other)
    assert [output.outputs[0].token_ids for output in again] == [answers[0], answers[1], answers[0]]


@pytest.fixture(scope="module")
def llm(tiny_qwen3: Path) -> Iterator[LLM]:
    with LLM(str(tiny_qwen3), enable_prompt_embeds=True, **ENGINE) as llm:
        yield llm


def with_nan() -> torch.Tensor:
    return torch.zeros(3, HIDDEN).index_fill(0, torch.tensor([1]), float("nan"))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt_embeds": torch.zeros(3, HIDDEN + 1)}, "must have 64 numbers a token"),
        ({"prompt_embeds": torch.zeros(3 * HIDDEN)}, "must have the shape"),
        ({"prompt_embeds": torch.zeros(1, 3, HIDDEN)}, "must have the shape"),
        ({"prompt_embeds": torch.zeros(0, HIDDEN)}, "must have the shape"),
        ({"prompt_embeds": torch.eye(HIDDEN).to_sparse()}, "must be a dense tensor"),
        ({"prompt_embeds": np.zeros((3, HIDDEN), np.int64)}, "floating-point numbers, got int64"),
        ({"prompt_embeds": [[0.0] * HIDDEN]}, "got list"),
        ({"prompt_embeds": with_nan()}, "finite"),
        ({"prompt_embeds": np.full((2, HIDDEN), 1e300)}, "finite"),
        ({"prompt_embeds": torch.zeros(3, HIDDEN), "prompt_token_ids": [1, 2, 3]}, "either"),
    ],
)
def test_what_is_no_prompt(llm: LLM, prompt: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        tokens(llm, [prompt])
    assert caught.value.param == "prompt_embeds"


def test_where_embeddings_cannot_be_used(llm: LLM, tiny_qwen3: Path) -> None:
    prompt = {"prompt_embeds": torch.zeros(3, HIDDEN)}
    with pytest.raises(InputError, match="prompt_logprobs are of token ids"):
        tokens(llm, [prompt], GREEDY.clone(prompt_logprobs=1))
    with pytest.raises(InputError, match="prompt is too long"):
        tokens(llm, [{"prompt_embeds": torch.zeros(128, HIDDEN)}])
    with LLM(str(tiny_qwen3), **ENGINE) as other, pytest.raises(InputError, match="started with enable_prompt_embeds"):
        tokens(other, [prompt])


# Bytes of clients


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def pickled(_: np.ndarray) -> bytes:
    stream = io.BytesIO()
    torch.save(torch.zeros(2, 3), stream)
    return stream.getvalue()


FORMATS: dict[str, Callable[[np.ndarray], bytes]] = {
    "npy": npy,
    "npy by columns": lambda array: npy(np.asfortranarray(array)),
    "npy, half": lambda array: npy(array.astype(np.float16)),
    "npy, big-endian": lambda array: npy(array.astype(">f4")),
    "safetensors": lambda array: save({"x": torch.from_numpy(array)}),
    "safetensors, half": lambda array: save({"x": torch.from_numpy(array).half()}),
    "safetensors, bfloat16": lambda array: save({"x": torch.from_numpy(array).bfloat16()}, {"made": "here"}),
}
VALUES = np.array([[0.5, -2.0, 0.0], [1.0, 8.0, -0.125]], np.float32)  # exact in every type


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    found = prompt_embeds.decode(base64.b64encode(FORMATS[name](VALUES)).decode())
    assert found.dtype == np.float32
    assert (found == VALUES).all()


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("/tmp/quire-was-here"),)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no header"),
        (pickle.dumps(VALUES), "looks like torch.save or pickle"),
        (pickle.dumps(Bomb()), "looks like torch.save or pickle"),
        (pickled(VALUES), "looks like torch.save or pickle"),
        (npy(np.array([{}], dtype=object)), "object"),
        (npy(VALUES)[:-1], "cannot have the shape"),
        (npy(VALUES).replace(b"(2, 3)", b"(2,-3)"), "cannot have the shape"),
        (npy(VALUES).replace(b"(2, 3), }", b"(2, 3),  "), "EOF"),
        (npy(VALUES).replace(b"(2, 3), }       ", b"(2, 30000000), }"), "cannot have the shape"),
        (npy(VALUES.astype(np.complex64)), "complex64"),
        (save({"x": torch.zeros(2, 3), "y": torch.zeros(2, 3)}), "holds 2 tensors"),
        (save({"x": torch.zeros(2, 3, dtype=torch.int64)}), "'I64'"),
        (save({"x": torch.zeros(2, 3)})[:-4], "does not fit"),
        (save({"x": torch.zeros(2, 3)}).replace(b"[2,3]", b"[2,4]"), "cannot have the shape"),
        (b"\xff" * 64, "no header"),
    ],
)
def test_bytes_that_are_no_prompt(data: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        prompt_embeds.decode(base64.b64encode(data).decode())
    assert not Path("/tmp/quire-was-here").exists()


def test_broken_bytes_are_refused_and_nothing_else() -> None:
    rng = random.Random(5)
    whole = [made(VALUES) for made in FORMATS.values()]
    for _ in range(1500):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(min(len(data), 160))] = rng.randrange(256)
        try:
            found = prompt_embeds.decode(
                base64.b64encode(data[: rng.choice([None, rng.randrange(len(data))])]).decode()
            )
        except InputError:
            continue
        assert found.dtype == np.float32
        assert found.ndim == 2
    with pytest.raises(InputError, match="must be base64"):
        prompt_embeds.decode("ä!")
