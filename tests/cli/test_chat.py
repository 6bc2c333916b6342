"""What `quire chat` does beside talking: commands, tools, images, markdown."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli import chat, complete
from quire.cli.conversation import Conversation
from quire.cli.http_client import Server, read_events
from quire.cli.talk import Local, Remote, TalkConfig, Thought
from quire.cli.view import View, split_done
from quire.foundation.error_codes import entry_of
from quire.foundation.errors import InputError


class Script:
    """A talker that gives what it was told, and keeps what it was asked."""

    name = "script"
    num_tokens = 0

    def __init__(self, *answers: tuple[list[str], list[dict[str, Any]]]) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.settings: dict[str, Any] = {"temperature": None, "max_tokens": 9}
        self.tool_calls: list[dict[str, Any]] = []

    def stream(self, prompt: Any) -> Any:
        self.asked.append(prompt)
        pieces, self.tool_calls = self.answers.pop(0)
        yield from pieces

    def close(self) -> None: ...


def say(talker: Script, text: str, monkeypatch: pytest.MonkeyPatch) -> Conversation:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    conversation = Conversation(talker)
    chat._converse(conversation, TalkConfig(stats=False))
    return conversation


def test_many_lines_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    talker = Script((["a"], []), (["b"], []))
    say(talker, 'one\\\n  two\n"""first\n\n  second"""\n/quit\n', monkeypatch)
    assert [asked[-1]["content"] for asked in talker.asked] == ["one\n  two", "first\n\n  second"]


def test_commands_change_what_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    talker = Script(*((["ok"], []) for _ in range(4)))
    lines = ["/system Be brief.", "one", "/params temperature=0.5 max_tokens= seed=7", "two", "/retry", "/undo"]
    conversation = say(talker, "\n".join([*lines, f"/save {tmp_path}/c.json", f"/save {tmp_path}/c.md"]), monkeypatch)
    assert [m["role"] for m in talker.asked[1]] == ["system", "user", "assistant", "user"]
    assert talker.asked[2] == talker.asked[1]  # asked again
    assert talker.settings == {"temperature": 0.5, "seed": 7}
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ok"},
    ]
    assert "**user**\n\none\n" in (tmp_path / "c.md").read_text()
    other = Conversation(Script())
    other.command(f"/load {tmp_path}/c.json")
    assert (other.system, other.messages) == ("Be brief.", conversation.messages)
    assert other.talker.settings["seed"] == 7


def test_a_call_is_answered_by_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text('[{"name": "weather", "parameters": {"type": "object"}}]')
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    talker = Script(([], [call]), (["It is sunny."], []))
    conversation = say(talker, f"/tools {tmp_path}/tools.json\nRome?\nsun\n", monkeypatch)
    assert talker.settings["tools"][0]["function"]["name"] == "weather"
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[2] == {"role": "tool", "tool_call_id": "1", "content": "sun"}


def test_an_image_goes_with_the_next_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    talker = Script((["a cat"], []))
    say(talker, f"/image {tmp_path}/a.png\nWhat is it?\n", monkeypatch)
    image, text = talker.asked[0][0]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
    assert text == {"type": "text", "text": "What is it?"}


@pytest.mark.parametrize(
    "line",
    ["/image no.png", "/image a.txt", "/load no.json", "/save /no/such/folder/x", "/params x", "/retry", "/tools no"],
)
def test_what_cannot_be_done_is_told(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(Script())
    chat._command(conversation, line)
    assert capsys.readouterr().err.strip()
    assert conversation.messages == []


def test_a_model_in_this_process_takes_no_images() -> None:
    conversation = Conversation(Local.__new__(Local))
    for line in ("/image a.png", "/tools t.json"):
        with pytest.raises(InputError, match="needs a server"):
            conversation.command(line)


def test_calls_come_in_parts_and_reasoning_apart() -> None:
    remote = Remote.__new__(Remote)
    remote.settings, remote.name = {}, "m"
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    lines = [b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() for delta in deltas]

    class Reply(list):  # type: ignore[type-arg]
        def close(self) -> None: ...

    class OneServer:
        api = "/v1"

        def send(self, *_arguments: Any) -> Any:
            return Reply([b": keep-alive", *lines, b"data: [DONE]"])

    remote._server = OneServer()  # type: ignore[assignment]
    pieces = [piece for piece in remote.stream([]) if piece]
    assert pieces == ["hm"]
    assert isinstance(pieces[0], Thought)
    assert remote.tool_calls == [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]


@contextlib.contextmanager
def refusing(status: int, headers: dict[str, str]) -> Iterator[str]:
    """The URL of a server that refuses everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "too hot"}}')

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "headers", "code"),
    [
        (400, {"x-error-code": "bad-sampling"}, "bad-sampling"),
        (400, {"x-error-code": "of another time"}, "no-server"),
        (502, {}, "no-server"),
    ],
)
def test_what_a_server_refuses_is_explained_as_what_it_is(status: int, headers: dict[str, str], code: str) -> None:
    """Not by how servers are found: it is there."""
    with refusing(status, headers) as url, pytest.raises(InputError, match="too hot") as caught:
        Server(url).send("POST", "/v1/completions", {"prompt": "a"})
    assert entry_of(caught.value).code == code


def test_text_that_is_none_is_not_sent() -> None:
    with pytest.raises(InputError, match="UTF-8"):
        Server("http://127.0.0.1:1").send("POST", "/v1/completions", {"prompt": "a\udcff"})


@pytest.mark.parametrize("module", [chat, complete])
def test_bytes_that_are_no_text_are_told(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"h\xff\n"), encoding="utf-8"))
    try:
        module.run(["--url", "http://127.0.0.1:1", "--model-name", "m"])
    except InputError as error:
        print(error, file=sys.stderr)
    assert "the text is not valid UTF-8" in capsys.readouterr().err


def test_an_error_within_a_stream_is_told() -> None:
    with pytest.raises(InputError, match="gave up: no more"):
        list(read_events([b'data: {"error": {"message": "no more"}}']))


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("one", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n```\ncode\n\nmore", "one\n\n"),
        ("```\na\n\nb\n```\n\nend", "```\na\n\nb\n```\n\n"),
    ],
)
def test_what_is_drawn_once_and_for_all(text: str, done: str) -> None:
    assert split_done(text) == (done, text.removeprefix(done))


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_markdown_is_drawn_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    view = View(wants_markdown=True)
    view.think("hm")
    for piece in ("# Ti", "tle\n\nsome **bo", "ld** text\n\n```python\nx = 1\n```\n"):
        view.add(piece)
    view.close()
    shown = screen.getvalue()
    assert "hm" in shown
    assert "**bold**" not in shown.rsplit("\x1b[?25l", 1)[-1]
    assert "bold" in shown
    assert "```" not in shown.rsplit("\x1b[?25l", 1)[-1]
