"""The real thing: `quire serve` on a small random model, asked by the official client."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.server.models_for_tests import CONTEXT, make_model
from tests.server.process import PATIENCE, ServerProcess, send_raw, server_process, status_of, wait_until
from tests.server.test_bad_input import CHAT, COMPLETION, SHARED

SERVE = "quire.cli.main"
NAME = "tiny"
HI = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def serve(model: Path, *arguments: str, **environment: str) -> Any:
    options = ["--port", "0", "--dtype", "float32", "--device", "cpu", "--served-model-name", NAME, "other-name"]
    return server_process(SERVE, "serve", str(model), *options, *arguments, **environment)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with serve(model) as process:
        assert process.url
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_start_up_prints_little(server: ServerProcess) -> None:
    """First: nobody has asked for anything."""
    assert wait_until(lambda: any("curl" in line for line in server.out))
    assert len(server.out) + len(server.err) <= 15, server.out + server.err


# What comes back


COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_p": 0.8, "seed": 1},
    {"n": 3, "seed": 5},
    {"logprobs": 3, "seed": 5},
    {"echo": True, "temperature": 0.0},
    {"echo": True, "logprobs": 2, "temperature": 0.0},
    {"stop": ["e", "\n"], "seed": 2, "max_tokens": 60},
    {"seed": 4, "max_tokens": 30, "extra_body": {"stop": ["a", "qu"], "include_stop_str_in_output": True}},
    {"presence_penalty": 1.0, "frequency_penalty": 1.0, "temperature": 0.0},
    {"logit_bias": {"65": 100}, "temperature": 0.0},
    {"seed": 3, "user": "me", "best_of": 1},
    {"extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 9}},
    {"extra_body": {"min_tokens": 12, "stop_token_ids": list(range(40, 60)), "seed": 9}, "max_tokens": 20},
    {"extra_body": {"ignore_eos": True, "skip_special_tokens": False, "seed": 9}},
    {"extra_body": {"allowed_token_ids": [40, 41, 42], "seed": 9}},
    {"extra_body": {"bad_words": ["a", "the"], "seed": 9}},
    {"extra_body": {"return_token_ids": True, "seed": 9}},
    {"extra_body": {"return_tokens_as_token_ids": True, "seed": 9}, "logprobs": 1},
    {"extra_body": {"truncate_prompt_tokens": 3, "add_special_tokens": False, "seed": 9}},
    {"extra_body": {"cache_salt": "mine", "priority": 0, "seed": 9}},
    {"extra_body": {"spaces_between_special_tokens": False, "seed": 9}},
]


@pytest.mark.parametrize("options", COMPLETIONS, ids=lambda o: json.dumps(o)[:70])
def test_completion_streamed_and_whole(client: openai.OpenAI, options: dict[str, Any]) -> None:
    options = {"model": NAME, "prompt": "The quick brown fox", "max_tokens": 12, "seed": 11} | options
    whole = client.completions.create(**options)
    usage, texts, tokens, finish = None, {}, {}, {}
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens if choice.logprobs else [])
            finish[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert finish[choice.index] == choice.finish_reason
        assert tokens[choice.index] == (choice.logprobs.tokens if choice.logprobs else [])
    assert usage is not None
    assert whole.usage is not None
    assert (usage.completion_tokens, usage.prompt_tokens) == (whole.usage.completion_tokens, whole.usage.prompt_tokens)


CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"temperature": 0.0, "max_completion_tokens": 9},
    {"logprobs": True, "top_logprobs": 3},
    {"logprobs": True},
    {"stop": "e", "max_tokens": 60},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.9},
    {"response_format": {"type": "text"}},
    {"tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]},
    {"tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "none"},
    {"extra_body": {"chat_template_kwargs": {"shout": True}}},
    {"extra_body": {"add_generation_prompt": False}},
    {"extra_body": {"top_k": 3, "return_token_ids": True}},
    {"messages": [*HI, {"role": "assistant", "content": "I am"}], "extra_body": {"continue_final_message": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]}]},
    {"messages": [{"role": "system", "content": "Be brief."}, *HI, {"role": "assistant", "content": "ok"}, *HI]},
]


@pytest.mark.parametrize("options", CHATS, ids=lambda o: json.dumps(o)[:70])
def test_chat_streamed_and_whole(client: openai.OpenAI, options: dict[str, Any]) -> None:
    options = {"model": NAME, "messages": HI, "seed": 11} | options
    if "max_completion_tokens" not in options:
        options.setdefault("max_tokens", 12)
    whole = client.chat.completions.create(**options)
    texts, roles, finish, tokens = {}, {}, {}, {}
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            roles[choice.index] = choice.delta.role or roles.get(choice.index)
            finish[choice.index] = choice.finish_reason
            entries = choice.logprobs.content or [] if choice.logprobs else []
            tokens.setdefault(choice.index, []).extend(entry.token for entry in entries)
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert roles[choice.index] == choice.message.role
        assert finish[choice.index] == choice.finish_reason
        entries = choice.logprobs.content or [] if choice.logprobs else []
        assert tokens[choice.index] == [entry.token for entry in entries]


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_many_prompts_answer_as_they_do_alone(server: ServerProcess) -> None:
    options = {"max_tokens": 6, "temperature": 0, "return_token_ids": True}
    prompts = ["The quick", "A quire is", "Hello"]
    together = post(server, "/v1/completions", prompt=prompts, **options)["choices"]
    alone = [post(server, "/v1/completions", prompt=prompt, **options)["choices"][0] for prompt in prompts]
    assert [c["token_ids"] for c in together] == [c["token_ids"] for c in alone]
    as_ids = [c["prompt_token_ids"] for c in together]
    again = post(server, "/v1/completions", prompt=as_ids, **options)["choices"]
    assert [c["token_ids"] for c in again] == [c["token_ids"] for c in alone]


def test_a_seed_repeats_and_n_answers_differ(server: ServerProcess) -> None:
    options = {"prompt": "Hello", "max_tokens": 12, "seed": 3, "n": 3, "return_token_ids": True}
    first, second = ([c["token_ids"] for c in post(server, "/v1/completions", **options)["choices"]] for _ in range(2))
    assert first == second
    assert len({tuple(ids) for ids in first}) == 3


def test_logprobs_are_those_of_the_echoed_text(server: ServerProcess) -> None:
    """What was generated greedily scores the same when it comes back as a prompt."""
    options = {"temperature": 0, "logprobs": 0, "return_token_ids": True}
    made = post(server, "/v1/completions", prompt="A quire is", max_tokens=5, **options)["choices"][0]
    whole = made["prompt_token_ids"] + made["token_ids"]
    scored = post(server, "/v1/completions", prompt=whole, max_tokens=0, echo=True, **options)["choices"][0]
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert scored["logprobs"]["token_logprobs"][-5:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_tokens_are_those_of_the_text(client: openai.OpenAI, stream: bool) -> None:
    """Random weights break characters into parts. Offsets never leave the text."""
    partial = 0
    for seed in range(4):
        more: dict[str, Any] = {"model": NAME, "temperature": 1.5, "stream": stream, "extra_body": {"seed": seed}}
        chat = client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=2, max_tokens=40, **more)
        parts = [c.choices[0] for c in chat if c.choices] if stream else [chat.choices[0]]
        said = "".join((part.delta if stream else part.message).content or "" for part in parts)
        entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace") == said
        partial += sum("\ufffd" in entry.token for entry in entries)
        made = client.completions.create(prompt="Grüße, 猫", logprobs=2, max_tokens=40, echo=True, **more)
        choices = [c.choices[0] for c in made if c.choices] if stream else [made.choices[0]]
        text = "".join(choice.text for choice in choices)
        offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
        assert text.startswith("Grüße, 猫")
        assert offsets == sorted(offsets)
        assert 0 <= offsets[0] <= offsets[-1] <= len(text)
        if not stream:
            response = client.responses.create(
                model=NAME, input=HI, temperature=1.5, include=["message.output_text.logprobs"], max_output_tokens=40
            )
            for item in response.output:
                for part in item.content:
                    joined = b"".join(bytes(entry.bytes) for entry in part.logprobs)
                    assert joined.decode("utf-8", "replace") == part.text
    assert partial > 4


def test_prompt_logprobs(server: ServerProcess) -> None:
    reply = post(server, "/v1/completions", prompt="A quire is", max_tokens=1, prompt_logprobs=2, return_token_ids=True)
    choice = reply["choices"][0]
    ids, positions = choice["prompt_token_ids"], choice["prompt_logprobs"]
    assert positions[0] is None
    assert all(str(token) in entries for token, entries in zip(ids[1:], positions[1:], strict=True))


def test_min_and_max_and_finish_reasons(server: ServerProcess) -> None:
    stopped = post(server, "/v1/completions", prompt="Hello", logit_bias={"2": 100}, max_tokens=9, temperature=0)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] is None
    assert stopped["usage"]["completion_tokens"] == 1
    longer = post(server, "/v1/completions", prompt="Hello", logit_bias={"2": 100}, max_tokens=9, min_tokens=4)
    assert longer["usage"]["completion_tokens"] == 5
    ignored = post(server, "/v1/completions", prompt="Hello", logit_bias={"2": 100}, max_tokens=9, ignore_eos=True)
    assert ignored["choices"][0]["finish_reason"] == "length"


def test_the_context_is_filled_and_never_passed(server: ServerProcess) -> None:
    reply = post(server, "/v1/chat/completions", messages=HI, ignore_eos=True, temperature=0)
    assert reply["usage"]["total_tokens"] == CONTEXT
    assert reply["choices"][0]["finish_reason"] == "length"


PROMPT = [65] * 200
ROOM = CONTEXT - len(PROMPT)
ENDS = {"logit_bias": {"2": 100}}  # at once
BATCHED = {"messages": [HI, HI]}
LIMITED: list[tuple[str, str, dict[str, Any]]] = [  # path, the field that limits the answer, the request without it
    ("/v1/completions", "max_tokens", {"prompt": PROMPT, **ENDS}),
    ("/v1/completions", "max_tokens", {"prompt": [PROMPT[:9], PROMPT], "stream": True, **ENDS}),
    ("/v1/completions", "max_tokens", {"prompt": PROMPT, "use_beam_search": True, "n": 2}),
    ("/v1/completions/render", "max_tokens", {"prompt": PROMPT}),
    ("/v1/chat/completions", "max_tokens", {"messages": HI, **ENDS}),
    ("/v1/chat/completions", "max_completion_tokens", {"messages": HI, "stream": True, **ENDS}),
    ("/v1/chat/completions", "max_tokens", {"messages": HI, "use_beam_search": True, "n": 2}),
    ("/v1/chat/completions/batch", "max_completion_tokens", {**BATCHED, **ENDS}),
    ("/v1/responses", "max_output_tokens", {"input": HI, **ENDS}),
    ("/v1/responses", "max_output_tokens", {"input": HI, "stream": True, **ENDS}),
    ("/inference/v1/generate", "max_tokens", {"token_ids": PROMPT}),
]


@pytest.mark.parametrize(("path", "field", "body"), LIMITED)
def test_a_limit_that_the_context_does_not_hold_is_refused(
    server: ServerProcess, path: str, field: str, body: dict[str, Any]
) -> None:
    """The last limit that is held is taken; one more is too many, and nothing is cut in silence."""
    is_of_tokens = path.startswith("/inference")
    num_prompt = len(PROMPT)
    if "/chat" in path or "/responses" in path:
        num_prompt = post(server, "/tokenize", messages=HI)["count"]

    def ask(limit: int) -> httpx.Response:
        wish = {"sampling_params": {field: limit, **ENDS}} if is_of_tokens else {field: limit}
        return httpx.post(server.url + path, json={**body, **wish}, timeout=60)

    refused = ask(CONTEXT - num_prompt + 1)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == field
    for said in (f"{field} is too large", "maximum context length is 256 tokens", f"{num_prompt} input tokens"):
        assert said in error["message"]
    if "use_beam_search" not in body:  # a search does not stop at the first end
        assert ask(CONTEXT - num_prompt).status_code == 200


LONG = "x y " * CONTEXT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
    ],
)
def test_a_prompt_that_is_too_long_is_what_is_wrong(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    """Whatever limit stands beside it: to lower that would not help."""
    name = "max_output_tokens" if "input" in body else "max_tokens"
    refused = [
        httpx.post(server.url + path, json={**body, name: limit}, timeout=60) for limit in (1, CONTEXT, 10 * CONTEXT)
    ]
    assert [reply.status_code for reply in refused] == [400] * 3
    assert len({reply.text for reply in refused}) == 1
    assert "the prompt is too long" in refused[0].json()["error"]["message"]


def test_what_is_not_asked_is_what_the_context_leaves(server: ServerProcess) -> None:
    """Completions without a limit have 16 tokens at most, or less; Messages are cut, which their stop_reason says."""
    short = post(server, "/v1/completions", prompt=PROMPT + [65] * (ROOM - 5), ignore_eos=True)
    assert short["usage"]["completion_tokens"] == 5
    message = post(server, "/v1/messages", model=NAME, max_tokens=10**6, messages=HI, seed=1)
    assert message["stop_reason"] in ("model_context_window_exceeded", "end_turn")


def test_continuing_a_message_goes_on_where_it_ends(server: ServerProcess) -> None:
    prompt = post(
        server, "/tokenize", messages=[*HI, {"role": "assistant", "content": "I am"}], continue_final_message=True
    )
    text = post(server, "/detokenize", tokens=prompt["tokens"])["prompt"]
    assert text.endswith("<|im_start|>assistant\nI am")


def test_both_names_and_the_client_list_models(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == [NAME, "other-name"]
    assert client.models.retrieve("other-name").id == "other-name"


# What harms nobody


NEIGHBOURS = 64


async def neighbours(client: httpx.AsyncClient) -> list[list[int]]:
    async def one(i: int) -> list[int]:
        body = {"prompt": f"A quire {i} is", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        reply = await client.post("/v1/completions", json=body | {"return_token_ids": True})
        return reply.json()["choices"][0]["token_ids"]

    return await asyncio.gather(*(one(i) for i in range(NEIGHBOURS)))


def test_neighbours_do_not_notice_bad_requests(server: ServerProcess) -> None:
    """64 requests answer the same alone and amid every kind of bad input, each of which gets its 400."""
    bad = [("/v1/completions", field, {"prompt": "a"} | change) for field, change in [*SHARED, *COMPLETION]]
    bad += [("/v1/chat/completions", field, {"messages": HI} | change) for field, change in [*SHARED, *CHAT]]
    bad += [
        ("/v1/completions", "prompt", {"prompt": [10**6]}),
        ("/v1/completions", "prompt", {"prompt": "word " * 2000}),
        ("/v1/completions", "logprobs", {"prompt": "a", "logprobs": 21}),
        ("/v1/chat/completions", "top_logprobs", {"messages": HI, "logprobs": True, "top_logprobs": 21}),
        ("/v1/completions", "logit_bias", {"prompt": "a", "logit_bias": {"99999": 1}}),
        ("/v1/completions", "allowed_token_ids", {"prompt": "a", "allowed_token_ids": [99999]}),
        ("/v1/completions", "stop_token_ids", {"prompt": "a", "stop_token_ids": [99999]}),
    ]

    async def scenario() -> tuple[list[list[int]], list[list[int]], list[httpx.Response]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            calm = await neighbours(client)
            harried, *answers = await asyncio.gather(
                neighbours(client), *(client.post(path, json=body) for path, _, body in bad)
            )
            return calm, harried, answers

    calm, harried, answers = asyncio.run(scenario())
    assert harried == calm
    for (path, field, body), answer in zip(bad, answers, strict=True):
        assert answer.status_code == 400, (path, body, answer.text)
        assert field in answer.json()["error"]["param"], (path, body, answer.text)


def test_a_storm_of_disconnects_frees_everything(server: ServerProcess) -> None:
    dice = random.Random(0)
    for round_ in range(12):
        options = [{"stream": bool(i % 2), "n": 1 + i % 3, "prompt": f"storm {i}"} for i in range(16)]
        sockets = [send_raw(server.url, "/v1/completions", max_tokens=200, **fields) for fields in options]
        time.sleep(dice.random() * 0.02 * (round_ % 5))
        for connection in sockets:
            connection.close()
    assert wait_until(
        lambda: gauge(server, "vllm:num_requests_running") == gauge(server, "vllm:num_requests_waiting") == 0
    )
    assert wait_until(lambda: gauge(server, "quire:seats_used") == 0)
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    assert httpx.get(f"{server.url}/readyz").status_code == 200


def gauge(server: ServerProcess, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return float(next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name + "{")))


def test_metrics_of_the_engine(server: ServerProcess) -> None:
    names = ("vllm:generation_tokens_total", "quire:steps_total", "vllm:iteration_tokens_total_count")
    before, steps, seen = (gauge(server, name) for name in names)
    post(server, "/v1/completions", prompt="Hello", max_tokens=10, ignore_eos=True)
    assert wait_until(lambda: gauge(server, "vllm:generation_tokens_total") >= before + 9)
    assert gauge(server, "vllm:time_to_first_token_seconds_count") > 0
    assert wait_until(lambda: gauge(server, names[1]) >= steps + 10)
    assert gauge(server, names[2]) - seen == gauge(server, names[1]) - steps, "no step is missed between two reports"
    assert gauge(server, "quire:kv_blocks") > 0


# Its life


def test_sigterm_while_the_model_loads_ends_all_processes(model: Path) -> None:
    with serve(model) as process:
        started = psutil.Process(process.process.pid)
        # It answers probes from then on; its core may be there before.
        assert wait_until(lambda: any(one.status == psutil.CONN_LISTEN for one in started.net_connections()))
        children = started.children(recursive=True)
        assert children
        process.signal(signal.SIGTERM)
        assert process.exit_code() == 0
        assert not psutil.wait_procs(children, timeout=PATIENCE)[1]


def test_a_killed_engine_process_ends_the_server_if_no_other_is_wanted(model: Path) -> None:
    with serve(model, "--max-engine-restarts", "0") as process:
        url = process.url
        children = psutil.Process(process.process.pid).children(recursive=True)
        assert children, "the engine runs in a process of its own"
        for child in children:
            if "resource_tracker" not in " ".join(child.cmdline()):
                child.kill()
        assert wait_until(lambda: status_of(f"{url}/readyz") in (0, 503))
        assert process.exit_code() == 4
        assert wait_until(lambda: bool(process.err))


@pytest.mark.long  # as `test_hangs.py` stops those of a larger server
def test_a_stopped_engine_is_not_ready_until_it_goes_on(model: Path) -> None:
    with serve(model, "--hang-timeout", "1") as process:
        url = process.url
        children = psutil.Process(process.process.pid).children(recursive=True)
        for child in children:
            child.suspend()
        with send_raw(url, "/v1/completions", prompt="x") as connection:
            assert wait_until(lambda: status_of(f"{url}/readyz") == 503)
            assert status_of(f"{url}/livez") == 200
            for child in children:
                child.resume()
            assert wait_until(lambda: status_of(f"{url}/readyz") == 200)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_an_idle_server_sleeps_in_all_its_processes(server: ServerProcess) -> None:
    main = psutil.Process(server.process.pid)
    processes = [main, *main.children(recursive=True)]
    wait_until(lambda: False, 1.5)

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = used()
    wait_until(lambda: False, 4.0)
    assert used() - before < 0.2  # 5 % of a core; a polling loop would take all of it


def test_a_server_without_tokenizer_works_on_ids(model: Path) -> None:
    with serve(model, "--skip-tokenizer-init") as process:
        url = process.url
        ids = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True, "logprobs": 1}
        reply = post(process, "/v1/completions", **ids, echo=True)
        assert len(reply["choices"][0]["token_ids"]) == 4
        assert reply["choices"][0]["logprobs"]["tokens"][0] == "token_id:5"
        for path, body in [
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/completions", {"prompt": [5], "stop": "x"}),
            ("/v1/chat/completions", {"messages": HI}),
            ("/tokenize", {"prompt": "text"}),
            ("/detokenize", {"tokens": [5]}),
        ]:
            assert httpx.post(url + path, json=body).status_code == 400, (path, body)


@pytest.mark.long
def test_the_demo_model_is_served_when_no_model_is_named() -> None:
    with server_process(SERVE, "serve", "--port", "0", "--device", "cpu", "--max-num-seqs", "4") as process:
        reply = post(process, "/v1/chat/completions", messages=HI, max_tokens=16, temperature=0)
        assert reply["model"] == "quire-demo"
        assert reply["choices"][0]["message"]["content"].strip()


def test_sigterm_drains(server: ServerProcess) -> None:
    """Last: it ends the server."""
    body = {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.exit_code() == 0
    assert "Traceback" not in "".join(server.err)
    assert "leaked" not in "".join(server.err)  # by what binds Triton to Python
