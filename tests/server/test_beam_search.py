"""use_beam_search over HTTP, and LLM.beam_search: the answers and scores of transformers, on the demo model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

import quire.demo_model
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.llm import LLM
from quire.types.sampling import BeamSearchParams
from tests.effort import WHOLE
from tests.server.process import ServerProcess, wait_until

FOLDER = Path(quire.demo_model.__path__[0])
CHATS = ["Hello!", "What is 2 + 3?", "Who are you?"][: 2 + WHOLE]
OPTIONS: list[dict[str, Any]] = [
    {"n": 4, "max_tokens": 24},
    {"n": 3, "max_tokens": 40, "length_penalty": 0.0},
    {"n": 4, "max_tokens": 24, "length_penalty": 2.0, "early_stopping": True},
    {"n": 2, "max_tokens": 30, "length_penalty": -1.0, "early_stopping": "never"},
]


@pytest.fixture(scope="module")
def server(demo_server: ServerProcess) -> ServerProcess:
    return demo_server


@cache
def theirs() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER)


def expected(ids: list[int], options: dict[str, Any]) -> list[tuple[list[int], float]]:
    """What transformers gives: answers without their end, and scores."""
    return _expected(tuple(ids), json.dumps(options))


@cache
def _expected(ids: tuple[int, ...], named: str) -> list[tuple[list[int], float]]:
    model, options = theirs(), json.loads(named)
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            num_beams=options["n"],
            num_return_sequences=options["n"],
            max_new_tokens=options["max_tokens"],
            length_penalty=options.get("length_penalty", 1.0),
            early_stopping=options.get("early_stopping", False),
            do_sample=False,
            repetition_penalty=1.0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    answers = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        answer = row[len(ids) :]
        end = next((i for i, token in enumerate(answer) if token in ends), len(answer))
        answers.append((answer[:end], score))
    return answers


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chat_equals_transformers(server: ServerProcess, tokenizer: Tokenizer, options: dict[str, Any]) -> None:
    finished = set()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for question in CHATS:
            plain = {name: value for name, value in options.items() if name in ("n", "max_tokens")}
            extra = {name: value for name, value in options.items() if name not in plain}
            reply: Any = client.chat.completions.create(
                model=client.models.list().data[0].id,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                logprobs=True,
                extra_body={"use_beam_search": True, "return_token_ids": True, **extra},
                **plain,
            )
            answers = expected(reply.prompt_token_ids, options)
            assert [choice.token_ids for choice in reply.choices] == [ids for ids, _ in answers]
            for choice, (ids, score) in zip(reply.choices, answers, strict=True):
                assert choice.message.content.strip() == tokenizer.decode(ids, skip_special_tokens=True).strip()
                assert len(choice.logprobs.content) == len(ids)
                finished.add(choice.finish_reason)
                if choice.finish_reason == "length":  # of the others the end has a part in the score, and is not shown
                    total = sum(entry.logprob for entry in choice.logprobs.content)
                    assert total / len(ids) ** options.get("length_penalty", 1.0) == pytest.approx(score, abs=1e-3)
            assert reply.usage.completion_tokens == sum(len(ids) for ids, _ in answers)
    assert finished <= {"stop", "length"}


def test_offline_equals_transformers_to_the_score(tokenizer: Tokenizer) -> None:
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True) for q in CHATS
    ]
    reasons = set()
    with LLM(dtype="float32", device="cpu", max_logprobs=-1) as llm:
        for options in OPTIONS:
            params = BeamSearchParams(beam_width=options["n"], **{k: v for k, v in options.items() if k != "n"})
            for prompt, result in zip(prompts, llm.beam_search(prompts, params), strict=True):
                answers = expected(prompt, options)
                assert [beam.tokens[len(prompt) :] for beam in result.sequences] == [ids for ids, _ in answers]
                for beam, (_, score) in zip(result.sequences, answers, strict=True):
                    assert beam.cum_logprob / len(beam.logprobs) ** params.length_penalty == pytest.approx(
                        score, abs=1e-3
                    )
                    reasons.add(beam.finish_reason)
    assert reasons == {"stop", "length"}


def test_completions_and_what_a_search_leaves_behind(server: ServerProcess) -> None:
    body = {
        "prompt": ["Hello", "The"],
        "n": 3,
        "max_tokens": 8,
        "use_beam_search": True,
        "logprobs": 2,
        "temperature": 0,
    }
    with httpx.Client(base_url=server.url, timeout=60) as client:
        whole = client.post("/v1/completions", json=body).json()
        assert [choice["index"] for choice in whole["choices"]] == list(range(6))
        assert all(len(top) in (2, 3) for c in whole["choices"] for top in c["logprobs"]["top_logprobs"])
        alone = client.post("/v1/completions", json=body | {"prompt": "The"}).json()
        assert [c["text"] for c in alone["choices"]] == [c["text"] for c in whole["choices"][3:]]
        refused = client.post("/v1/completions", json=body | {"n": 30}).json()["error"]
        assert (refused["code"], refused["param"]) == (400, "n")
        with pytest.raises(httpx.ReadTimeout):  # a client that goes away
            client.post(
                "/v1/completions",
                json=body | {"max_tokens": 400, "ignore_eos": True},
                timeout=httpx.Timeout(60, read=0.3),
            )
        assert wait_until(lambda: num_running(client) == 0)


def num_running(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    (line,) = (line for line in lines if ":num_requests_running" in line and not line.startswith("#"))
    return float(line.split()[-1])
