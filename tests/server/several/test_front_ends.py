"""`quire serve --api-server-count 2` with the official client: one server, whichever of its processes answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.server.responses.store import number_of
from tests.server.process import PATIENCE, ServerProcess, send_raw, server_process, status_of, wait_until

MODEL = "quire-demo"
HI = [{"role": "user", "content": "Hello, who are you?"}]


def serve(folder: Path, *arguments: str, count: int = 2, **environment: str) -> Any:
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "600"]
    options += ["--api-server-count", str(count), "--batch-dir", str(folder)]
    return server_process("quire.cli.main", "serve", *options, *arguments, **environment)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """In the end it is killed, and nothing of it may stay."""
    sockets = Path(tempfile.mkdtemp(dir="/tmp", prefix="qt-"))
    with serve(tmp_path_factory.mktemp("batches"), TMPDIR=str(sockets)) as process:
        assert process.url
        yield process
        family = psutil.Process(process.process.pid).children(recursive=True)
        assert len(family) >= 3  # the core and two front ends
        assert len(list(sockets.glob("quire-*"))) >= 4
        process.process.kill()
        assert wait_until(lambda: not any(is_alive(one) for one in family))
        assert list(sockets.glob("quire-*")) == []
    sockets.rmdir()


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def metrics(server: ServerProcess) -> dict[str, float]:
    """Sums over all labels, and the numbers of each front end as name[0], name[1]."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=60).text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
            if "finished_reason" in sample.labels:
                name = f"{sample.name}[{sample.labels['finished_reason']}]"
                found[name] = found.get(name, 0.0) + sample.value
            if "front_end" in sample.labels:
                found[f"{sample.name}[{sample.labels['front_end']}]"] = sample.value
    return found


def connect(server: ServerProcess) -> openai.OpenAI:
    """All of its requests come over one connection, so to one front end."""
    http = httpx.Client(limits=httpx.Limits(max_connections=1, keepalive_expiry=600), timeout=60)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http)


@pytest.fixture
def pair(server: ServerProcess) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """A client of each front end: a new connection goes to the process that has fewer."""
    clients: dict[int | None, openai.OpenAI] = {}
    with contextlib.ExitStack() as stack:
        for _ in range(10):  # the lighter one may be late if the machine is busy
            client = stack.enter_context(connect(server))
            clients.setdefault(number_of(ask(client, "Hi", max_output_tokens=1).id), client)
            if len(clients) == 2:
                break
        yield clients[0], clients[1]


def get(client: openai.OpenAI, path: str) -> httpx.Response:
    """What is not part of OpenAI's API, over the client's connection."""
    return client._client.get(str(client.base_url).removesuffix("/v1/") + path)


def ask(client: openai.OpenAI, text: Any, **options: Any) -> Any:
    return client.responses.create(model=MODEL, input=text, temperature=0, **{"max_output_tokens": 8} | options)


# -- streams -----------------------------------------------------------------------------------------------------


def test_streams_spread_and_are_what_they_were(server: ServerProcess) -> None:
    before = metrics(server)

    async def main() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(limits=limits, timeout=60) as http,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, http_client=http) as client,
        ):

            async def stream(number: int) -> str:
                chunks = await client.chat.completions.create(
                    model=MODEL, messages=[*HI], max_tokens=24, temperature=0, stream=True, user=str(number),
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                return "".join([c.choices[0].delta.content or "" async for c in chunks])

            return await asyncio.gather(*map(stream, range(32)))

    texts = asyncio.run(main())
    assert len(set(texts)) == 1
    assert texts[0]
    after = metrics(server)
    answers = [
        after[f"quire:front_end_answers_total[{n}]"] - before[f"quire:front_end_answers_total[{n}]"] for n in (0, 1)
    ]
    assert sum(answers) == 32
    assert min(answers) >= 8, answers


def test_metrics_are_the_same_from_both_and_add_up(server: ServerProcess, pair: Any) -> None:
    assert wait_until(lambda: metrics(server)["vllm:num_requests_running"] == 0)
    before = metrics(server)
    for client in pair:
        client.chat.completions.create(model=MODEL, messages=HI, max_tokens=7, extra_body={"ignore_eos": True})
    assert wait_until(
        lambda: metrics(server)["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 14
    )
    after = metrics(server)
    gained = {name: after[name] - before[name] for name in before}
    assert gained["vllm:request_success_total"] == 2
    assert gained["vllm:request_generation_tokens_sum"] == 14
    assert gained["vllm:e2e_request_latency_seconds_count"] == 2
    assert gained["quire:front_end_answers_total[0]"] == gained["quire:front_end_answers_total[1]"] == 1
    # Every step is counted by one of them: prompts are computed but for what the prefix cache has.
    computed = gained["vllm:prompt_tokens_total"] - gained["vllm:prompt_tokens_cached_total"]
    assert gained["vllm:iteration_tokens_total_sum"] == computed + 12

    def counters(client: openai.OpenAI) -> list[str]:
        lines = get(client, "/metrics").text.splitlines()
        return [line for line in lines if line.startswith(("vllm:request", "vllm:generation", "quire:front"))]

    assert wait_until(lambda: counters(pair[0]) == counters(pair[1]))
    assert len(counters(pair[0])) > 50


def test_the_dashboard_of_one_shows_the_requests_of_both(server: ServerProcess, pair: Any) -> None:
    """Who asked, what has ended and what failed, and the life of a request with its text."""
    state = "/dashboard/state"
    urls = [client._client for client in pair]  # a connection to each
    for http in urls:
        assert http.get(f"{server.url}{state}").status_code == 200  # from now on what ends is kept
    streams = []
    for number, client in enumerate(pair):
        options = {"extra_body": {"ignore_eos": True, "request_id": f"seen-{number}"}, "max_tokens": 300}
        streams.append(client.chat.completions.create(model=MODEL, messages=HI, stream=True, **options))
        next(streams[-1])
    lone = httpx.Client(base_url=server.url, timeout=60)
    wanted = {f"chatcmpl-seen-{number}" for number in (0, 1)}

    def of_both() -> bool:
        told = lone.get(state).json()
        routes = {one[0]: one[-1] for core in told["cores"] for one in core["requests"]}
        ended = {one["id"]: one["route"] for one in told["ended"]}
        assert told["silent"] == []
        return {each for each, route in (ended | routes).items() if route == "/v1/chat/completions"} >= wanted

    assert wait_until(of_both)
    for stream in streams:
        for _ in stream:
            pass
    assert wait_until(lambda: {one["id"] for one in lone.get(state).json()["ended"]} >= wanted)
    for each in wanted:
        life = lone.get(f"/dashboard/requests/{each}").json()
        assert life["http"]["route"] == "/v1/chat/completions"
        assert life["answers"][0]["num_tokens"] == 300
        assert len(life["answers"][0]["tokens"]) == 300
        assert life["events"][0][1] == "seated"
    for client in pair:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=MODEL, messages=HI, max_tokens=-1)
    assert wait_until(lambda: len([e for e in lone.get(state).json()["errors"] if e["status"] == 400]) >= 2)
    assert lone.get("/dashboard/requests/nobody").status_code == 404
    lone.close()


def test_they_are_one_server(server: ServerProcess, pair: Any) -> None:
    zero, one = ([m.model_dump() for m in client.models.list()] for client in pair)
    assert zero == one
    connection = send_raw(server.url, "/v1/completions", prompt="a", max_tokens=1500, n=3, ignore_eos=True, stream=True)
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    for client in pair:
        assert get(client, "/load").json() == {"server_load": 3}
        assert get(client, "/readyz").status_code == 200
    connection.close()  # reaches the core
    assert wait_until(lambda: metrics(server)["quire:seats_used"] == 0)
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}


@pytest.mark.long
def test_a_request_id_is_taken_on_both(pair: Any) -> None:
    zero, one = pair
    options = {"model": MODEL, "prompt": "a", "max_tokens": 400, "extra_body": {"request_id": "x", "ignore_eos": True}}
    stream = zero.completions.create(**options, stream=True)
    next(stream)
    with pytest.raises(openai.BadRequestError, match="in use"):
        one.completions.create(**options)
    finish = [chunk.choices[0].finish_reason for chunk in stream][-1]
    assert finish == "length"  # the refusal of the other did not end it


# -- stored responses --------------------------------------------------------------------------------------------


def test_a_chain_goes_on_wherever_it_is_asked(pair: Any) -> None:
    zero, one = pair
    first = ask(zero, "Hello, who are you?")
    assert number_of(first.id) == 0
    second = ask(one, "And who am I?", previous_response_id=first.id)
    third = ask(zero, "Thank you", previous_response_id=second.id)
    assert [number_of(r.id) for r in (second, third)] == [0, 0]  # a chain stays together
    assert first.usage.input_tokens < second.usage.input_tokens < third.usage.input_tokens
    history = [
        {"role": "user", "content": "Hello, who are you?"}, *first.output,
        {"role": "user", "content": "And who am I?"}, *second.output, {"role": "user", "content": "Thank you"},
    ]  # fmt: skip
    assert ask(one, history, store=False).output_text == third.output_text
    *_, last = ask(one, "More", previous_response_id=third.id, stream=True)
    fourth = last.response
    assert fourth.usage is not None
    assert fourth.usage.input_tokens > third.usage.input_tokens
    counted = one.responses.input_tokens.count(model=MODEL, input="More", previous_response_id=third.id)
    assert counted.input_tokens == fourth.usage.input_tokens


def test_a_stored_response_is_had_from_both(pair: Any) -> None:
    for here, there in (pair, pair[::-1]):
        made = ask(here, "Hello")
        assert there.responses.retrieve(made.id) == here.responses.retrieve(made.id)
        items = there.responses.input_items.list(made.id).data
        assert items[0].content[0].text == "Hello"
        again = ask(there, [{"type": "item_reference", "id": items[0].id}])
        assert again.output_text == made.output_text
        more = {"role": "user", "content": "And who am I?"}  # items of both in one request
        parts = [{"type": "item_reference", "id": item} for item in (items[0].id, again.output[0].id)]
        assert ask(here, [*parts, more]).output_text == ask(there, [*parts, more]).output_text
        assert ask(here, [*parts, more]).output_text == ask(here, [items[0], again.output[0], more]).output_text
        with pytest.raises(openai.BadRequestError, match="streamed later"):
            there.get(f"/responses/{made.id}?stream=true", cast_to=object)
        there.responses.delete(made.id)
        for client in pair:
            with pytest.raises(openai.NotFoundError, match=made.id):
                client.responses.retrieve(made.id)
            with pytest.raises(openai.NotFoundError, match="no stored response"):
                ask(client, "x", previous_response_id=made.id)
            with pytest.raises(openai.BadRequestError, match="not stored"):
                ask(client, [{"type": "item_reference", "id": "msg_none"}])


def test_an_id_of_the_client_is_found_and_is_unique(pair: Any) -> None:
    zero, one = pair
    made = ask(one, "Hello", extra_body={"request_id": "resp_of-mine"})
    assert made.id == "resp_of-mine"
    assert zero.responses.retrieve("resp_of-mine").output_text == made.output_text
    for client in pair:
        with pytest.raises(openai.BadRequestError, match="in use"):
            ask(client, "Hello", extra_body={"request_id": "resp_of-mine"})
    zero.responses.delete("resp_of-mine")


def test_a_response_in_the_background_from_the_other(pair: Any) -> None:
    zero, one = pair
    made = ask(one, "Hello", background=True, max_output_tokens=30)
    events = list(zero.responses.retrieve(made.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert zero.responses.retrieve(made.id).output_text == one.responses.retrieve(made.id).output_text != ""
    long = ask(one, "Hello", background=True, max_output_tokens=1500, extra_body={"ignore_eos": True})
    assert zero.responses.cancel(long.id).status == "cancelled"
    assert one.responses.retrieve(long.id).status == "cancelled"


# -- files and batches -------------------------------------------------------------------------------------------


def batch_lines(count: int) -> bytes:
    line = {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": HI, "max_tokens": 4, "seed": 1}}
    return b"".join(json.dumps({"custom_id": str(n), **line}).encode() + b"\n" for n in range(count))


def submit(client: openai.OpenAI, count: int) -> Any:
    file = client.files.create(file=("in.jsonl", batch_lines(count)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def test_batches_have_one_home(server: ServerProcess, pair: Any) -> None:
    zero, one = pair
    content = batch_lines(12)
    before = metrics(server)["vllm:request_success_total"]
    file = one.files.create(file=("in.jsonl", content), purpose="batch")
    assert zero.files.retrieve(file.id) == one.files.retrieve(file.id)
    assert zero.files.content(file.id).content == one.files.content(file.id).content == content
    batch = one.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert batch.id in [b.id for b in zero.batches.list()]
    assert wait_until(lambda: one.batches.retrieve(batch.id).status == "completed")
    done = zero.batches.retrieve(batch.id)
    assert done == one.batches.retrieve(batch.id)
    assert done.output_file_id is not None
    lines = one.files.content(done.output_file_id).text.splitlines()
    assert sorted(int(json.loads(line)["custom_id"]) for line in lines) == list(range(12))
    assert metrics(server)["vllm:request_success_total"] - before == 12  # once
    for client in pair:
        with pytest.raises(openai.NotFoundError):
            client.files.content("file-none")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("in.jsonl", content), purpose="fine-tune")
    one.files.delete(file.id)
    assert file.id not in [f.id for f in zero.files.list()]


# -- lives -------------------------------------------------------------------------------------------------------


class Reader(threading.Thread):
    """Reads one streamed completion in the background, over a connection of its own."""

    def __init__(self, url: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self.body = {"prompt": "hello", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        self.url = url
        self.lines: list[str] = []
        self.broke = False
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=60) as response:
                self.lines += (line for line in response.iter_lines() if line)
        except httpx.HTTPError:
            self.broke = True

    @property
    def finish(self) -> str:
        """The finish reason, "broken", or the type of the error that ended the stream."""
        self.join(PATIENCE)
        if self.broke or not self.lines:
            return "broken"
        last = json.loads(self.lines[-2].removeprefix("data: "))
        return str(last["error"]["type"] if "error" in last else last["choices"][0]["finish_reason"])


def readers(server: ServerProcess, count: int, tokens: int) -> list[Reader]:
    made = [Reader(server.url, tokens) for _ in range(count)]
    assert wait_until(lambda: all(reader.lines for reader in made))
    return made


def front_ends(server: ServerProcess) -> list[psutil.Process]:
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(server.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
                if "quire.server.processes.front_end" in child.cmdline():
                    found.append(child)
    return found


def test_a_front_end_that_is_killed_takes_only_its_own_along(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        assert server.url
        streams = readers(server, 6, 400)  # before one of them has a batch to do, and so fewer connections
        with connect(server) as client:
            batch = submit(client, 20)
        before = metrics(server)
        victim, survivor = front_ends(server)  # the first of them runs the batch
        victim.kill()
        # Only those of the other still run.
        assert wait_until(lambda: metrics(server)["quire:seats_used"] <= sum(one.is_alive() for one in streams))
        finishes = [reader.finish for reader in streams]
        assert set(finishes) == {"broken", "length"}
        aborted = "vllm:request_success_total[abort]"
        assert metrics(server)[aborted] >= before[aborted] + finishes.count("broken")
        assert wait_until(lambda: len(front_ends(server)) == 2 and metrics(server)["process_open_fds[0]"] > 0)
        fresh = next(one for one in front_ends(server) if one != survivor)
        assert wait_until(lambda: answers(server) == 2), "".join(server.err)
        after = metrics(server)
        counters = [name for name in before if name.endswith(("_total", "_count")) and not name.startswith("process_")]
        assert not [(name, before[name], after[name]) for name in counters if after[name] < before[name]]
        with connect(server) as client:  # nothing is lost, nothing is answered twice
            assert wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
            output = client.batches.retrieve(batch.id).output_file_id
            lines = client.files.content(output or "").text.splitlines()
        assert sorted(int(json.loads(line)["custom_id"]) for line in lines) == list(range(20))
        assert wait_until(lambda: metrics(server)["quire:kv_blocks_free"] == after["quire:kv_blocks"])
        assert "was killed by SIGKILL" in "".join(server.err)
        # SIGTERM: both finish what they have.
        streams = readers(server, 4, 150)
        server.signal(signal.SIGTERM)
        assert wait_until(lambda: status_of(f"{server.url}/readyz") == 503)
        assert {reader.finish for reader in streams} == {"length"}
        assert server.exit_code() == 0
        assert not is_alive(fresh)
        assert "Traceback" not in "".join(server.err)


def answers(server: ServerProcess) -> int:
    """How many front ends answer: two connections that are open at once go to both."""
    with connect(server) as one, connect(server) as two:
        made = [c.responses.create(model=MODEL, input="Hi", max_output_tokens=1, store=False) for c in (one, two)]
        return len({number_of(response.id) for response in made})


@pytest.mark.long
def test_a_dead_core_that_is_not_to_be_started_again_ends_them_all(tmp_path: Path) -> None:
    with serve(tmp_path, "--max-engine-restarts", "0") as server:
        assert server.url
        streams = readers(server, 4, 1500)
        family = psutil.Process(server.process.pid).children(recursive=True)
        core = next(one for one in family if "quire.engine.process" in one.cmdline())
        core.kill()
        assert {reader.finish for reader in streams} == {"ServiceUnavailableError"}
        assert server.exit_code() == 4
        assert "SIGKILL" in "".join(server.err)
        assert not any(map(is_alive, family))


@pytest.mark.long
def test_front_ends_that_keep_dying_end_the_server(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        assert server.url
        deaths = 0
        while server.process.poll() is None:
            for one in front_ends(server):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
                    deaths += 1
            time.sleep(0.05)
            assert deaths < 50
        assert server.exit_code() == 1
        assert "quire: error: the front end" in "".join(server.err)


def test_a_start_that_cannot_be(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with serve(tmp_path, "--port", str(taken.getsockname()[1])) as server:
            assert server.exit_code() == 2
            assert wait_until(lambda: "in use" in "".join(server.err))
    with serve(tmp_path, count=65) as server:
        assert server.exit_code() == 2
        assert wait_until(lambda: "api_server_count must be in [1, 64]" in "".join(server.err))


@pytest.mark.long
def test_probes_answer_while_loading_and_sigterm_then_ends_it(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serve(tmp_path, "--port", str(port)) as server:
        url = f"http://127.0.0.1:{port}"
        assert wait_until(lambda: status_of(f"{url}/livez") == 200)
        assert status_of(f"{url}/health") == 503 or any("Ready" in line for line in server.out)
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert not any(map(is_alive, family))
