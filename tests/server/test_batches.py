"""/v1/files and /v1/batches with the official client, on `quire serve` with a real model; killed and started again."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from quire.server.batches.lines import count_lines, read_lines
from tests.server.process import ServerProcess, server_process, wait_until

CHAT = "/v1/chat/completions"
FINAL = ("completed", "failed", "cancelled", "expired")


def serve(folder: Path, *arguments: str) -> Any:
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--batch-dir", str(folder)]
    options += ["--num-gpu-blocks-override", "600"]
    return server_process("quire.cli.main", "serve", *options, *arguments)


def line(number: int, body: dict[str, Any] | None = None, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 8, "seed": number}
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": url,
        "body": chat if body is None else body,
    } | fields


def jsonl(lines: list[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def connect(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def submit(client: openai.OpenAI, lines: list[Any], endpoint: Any = CHAT) -> Batch:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def finish(client: openai.OpenAI, batch: Batch, seconds: float = 120) -> Batch:
    assert wait_until(lambda: client.batches.retrieve(batch.id).status in FINAL, seconds)
    return client.batches.retrieve(batch.id)


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serve(folder, "--max-batch-file-bytes", "100000", "--max-batch-lines", "300") as process:
        assert process.url
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


def test_every_line_is_answered_as_if_it_had_been_asked(client: openai.OpenAI) -> None:
    lines = [line(n) for n in range(12)]
    batch = finish(client, submit(client, lines))
    assert batch.status == "completed", batch.errors
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (12, 12, 0)
    assert batch.error_file_id is None
    answers = {one["custom_id"]: one for one in results(client, batch.output_file_id)}
    assert len(answers) == 12
    for asked in lines:
        got = answers[asked["custom_id"]]
        assert got["error"] is None
        assert got["response"]["status_code"] == 200
        direct = client.chat.completions.create(model="quire-demo", **asked["body"])
        assert got["response"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As programs on Windows write it."""
    file = tmp_path / "in.jsonl"
    for content, lines in (("\ufeff{}\r\n\r\n{}\n", [b"{}\r\n", b"{}\n"]), ("\ufeff\n{}", [b"{}"]), ("\ufeff", [])):
        file.write_bytes(content.encode())
        assert [line.raw for line in read_lines(file, 1000)] == lines
        assert count_lines(file) == len(lines)


def test_a_bad_line_harms_no_other(client: openai.OpenAI) -> None:
    bad = [
        b"{not json",
        b"[1, 2]",
        {"method": "POST", "url": CHAT, "body": {}},
        line(1, url="/v1/embeddings"),
        line(2, {"messages": [{"role": "user", "content": "x"}], "temperature": -1}),
        line(3, {"messages": [{"role": "user", "content": "x"}], "stream": True}),
        line(4, {"messages": [{"role": "user", "content": "x"}], "model": "no-such-model"}),
        line(5, method="GET"),
        line(6, body=[]),  # type: ignore[arg-type]
        line(100),
    ]
    batch = finish(client, submit(client, [line(100), *bad, b"", line(101)]))
    assert batch.status == "completed"
    assert {one["custom_id"] for one in results(client, batch.output_file_id)} == {"line-100", "line-101"}
    failures = results(client, batch.error_file_id)
    assert len(failures) == len(bad)
    assert all(one["error"]["message"] for one in failures)
    said = {one["custom_id"]: one for one in failures}
    assert said["line-2"]["response"]["status_code"] == 400
    assert "temperature" in said["line-2"]["response"]["body"]["error"]["message"]
    assert said["line-4"]["response"]["status_code"] == 404
    assert "earlier line" in said["line-100"]["error"]["message"]
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, len(bad))


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 4}, "text_completion"),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}, "response"),
    ],
)
def test_other_endpoints(client: openai.OpenAI, endpoint: str, body: dict[str, Any], kind: str) -> None:
    batch = finish(client, submit(client, [line(n, body, endpoint) for n in range(3)], endpoint))
    answers = results(client, batch.output_file_id)
    assert [one["response"]["body"]["object"] for one in answers] == [kind] * 3
    if kind == "response":  # a batch does not fill the memory for stored responses
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answers[0]["response"]["body"]["id"])


def test_a_model_that_generates_has_no_embeddings(client: openai.OpenAI) -> None:
    batch = finish(client, submit(client, [line(1, {"input": "x"}, "/v1/embeddings")], "/v1/embeddings"))
    assert batch.output_file_id is None
    assert results(client, batch.error_file_id)[0]["response"]["status_code"] == 400


def test_the_life_of_a_file(client: openai.OpenAI) -> None:
    content = jsonl([line(1)])
    file = client.files.create(file=("mine.jsonl", content), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("mine.jsonl", len(content), "batch")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    assert [one.id for one in client.files.list(limit=1)] != []
    assert client.files.list(limit=1).has_more
    assert client.files.delete(file.id).deleted
    for gone in (lambda: client.files.retrieve(file.id), lambda: client.files.content(file.id)):
        with pytest.raises(openai.NotFoundError):
            gone()


def test_refusals(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x", b"1"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.files.create(file=("x", b""), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="max_batch_file_bytes") as refused:
        client.files.create(file=("x", b"x" * 200_000), purpose="batch")
    assert refused.value.status_code == 413
    long = client.files.create(file=("x", b"{}\n" * 301), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="max_batch_lines"):
        client.batches.create(input_file_id=long.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="does not exist"):
        client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        client.batches.create(input_file_id=long.id, endpoint="/v1/nothing", completion_window="24h")  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_../../etc/passwd")
    for path in ("/v1/files/..%2F..%2Flock", "/v1/files/file-none/content"):
        assert httpx.get(server.url + path).status_code == 404
    form = {"content-type": "multipart/form-data; boundary=x"}
    broken = httpx.post(f"{server.url}/v1/files", content=b"--x\r\nnonsense", headers=form)
    assert broken.status_code == 400
    assert httpx.post(f"{server.url}/v1/files", json={}).status_code == 400


@pytest.mark.long
def test_cancelled_batches_keep_their_answers(client: openai.OpenAI) -> None:
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}
    batch = submit(client, [line(n, body, "/v1/completions") for n in range(250)], "/v1/completions")
    assert wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="still reads"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    over = finish(client, batch)
    assert over.status == "cancelled"
    assert over.request_counts is not None
    assert 0 < over.request_counts.completed < 250
    assert len(results(client, over.output_file_id)) == over.request_counts.completed
    assert batch.id in [one.id for one in client.batches.list(limit=2)]
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    "ends", [(signal.SIGKILL,), pytest.param((signal.SIGKILL, signal.SIGTERM), marks=pytest.mark.long)], ids=len
)
def test_killed_and_started_again(tmp_path: Path, ends: tuple[signal.Signals, ...]) -> None:
    """Lives of a server: ended by signals, and one that comes to the end."""
    body = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True}
    num_lines = 80
    lines = [line(n, body | {"seed": n}, "/v1/completions") for n in range(num_lines)] + [b"{broken"]
    before = 0
    batch = None
    for end in (*ends, None):
        with serve(tmp_path, "--max-num-seqs", "4" if end else "64") as server, connect(server) as client:
            if batch is None:
                batch = submit(client, lines, "/v1/completions")
            if end is None:
                over = finish(client, batch)
                break

            before = grown(client, batch, before + 12)
            server.signal(end)
            server.exit_code()
            kept = next((tmp_path / "files").glob("*-output.data"))
            assert kept.read_bytes().count(b"\n") >= before  # what was told is on disk
            with open(kept, "ab") as file:
                file.write(b'{"id": "batch_req_1_cut off in the mid')
    assert over.status == "completed"
    assert before < num_lines
    answers = read_results(tmp_path, over.output_file_id)
    assert sorted(one["custom_id"] for one in answers) == sorted(f"line-{n}" for n in range(num_lines))
    assert len(read_results(tmp_path, over.error_file_id)) == 1
    assert over.request_counts is not None
    assert (over.request_counts.completed, over.request_counts.failed) == (num_lines, 1)


def grown(client: openai.OpenAI, batch: Batch, least: int) -> int:
    """How many lines are answered once so many are."""

    def completed() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        return counts.completed

    assert wait_until(lambda: completed() >= least)
    return completed()


def read_results(folder: Path, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(one) for one in (folder / "files" / f"{file_id}.data").read_bytes().splitlines()]


@pytest.mark.long
def test_who_waits_is_served_before_a_batch(tmp_path: Path) -> None:
    """All seats are taken by a batch that takes minutes; a request gets one at once."""
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
    with serve(tmp_path, "--max-num-seqs", "2") as server, connect(server) as client:
        long = {"n": 4} | body  # more answers than seats
        batch = submit(client, [line(n, long, "/v1/completions") for n in range(40)], "/v1/completions")
        gauge = "vllm:num_requests_waiting"
        assert wait_until(
            lambda: any(
                float(one.split()[-1]) > 0
                for one in httpx.get(f"{server.url}/metrics").text.splitlines()
                if one.startswith(gauge)
            )
        )
        for _ in range(3):
            client.completions.create(model="quire-demo", prompt="Hello", max_tokens=5)
        now = client.batches.retrieve(batch.id)
        assert now.status == "in_progress"
        assert now.request_counts is not None
        assert now.request_counts.completed < 20
        client.batches.cancel(batch.id)
        assert finish(client, batch).status == "cancelled"


@pytest.mark.long
def test_one_directory_one_server(client: openai.OpenAI, folder: Path) -> None:
    file = client.files.create(file=("in.jsonl", jsonl([line(1)])), purpose="batch")
    with serve(folder) as second:
        assert second.exit_code() == 2
        assert wait_until(lambda: any("in use by another server" in text for text in second.err + second.out))
    assert client.files.retrieve(file.id) == file
