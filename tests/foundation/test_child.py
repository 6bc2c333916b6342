"""Processes of our own. What the engine builds on them is tested with the engine; here: the parts it cannot show."""

from __future__ import annotations

import stat
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest

from quire.foundation.child import Child, Failure, Parent
from quire.foundation.errors import (
    ConfigError,
    DoesNotFitError,
    EngineDeadError,
    InputError,
    QuireError,
    WeightsError,
)
from quire.foundation.wire import WireError
from tests.server.process import PATIENCE

ME = "tests.foundation.test_child"


class Ask(msgspec.Struct, tag="ask"):
    what: str


class Say(msgspec.Struct, tag="say"):
    text: str


def main(arguments: list[str]) -> int:
    """What the child does."""
    parent: Parent[Ask] = Parent(arguments, Ask)
    while True:
        ask = parent.receive()
        if ask is None:
            continue
        if ask.what == "print":
            print("noise of a library")
            parent.channel.send(Say("printed"))
        elif ask.what == "last words":
            parent.channel.send(Say("goodbye"))
            parent.channel.close(linger=1)
            return 7
        elif ask.what == "end":
            return 0
        else:
            parent.channel.send(Say(ask.what))


@pytest.fixture
def child():
    made: Child[Say] = Child(ME, Say, "test child")
    yield made
    made.stop(grace=0)


def ask(child: Child[Say], what: str) -> str:
    child.channel.send(Ask(what))
    said = child.receive(10)
    assert said is not None
    return said.text


def test_messages_sent_before_the_child_is_up_arrive(child: Child[Say]) -> None:
    for i in range(100):
        child.channel.send(Ask(str(i)))
    assert [child.receive(10) for _ in range(100)] == [Say(str(i)) for i in range(100)]


def test_the_sockets_lie_where_only_we_can_go(child: Child[Say]) -> None:
    assert ask(child, "hello") == "hello"
    folder = child._folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {file.name for file in folder.iterdir()} == {"up", "down"}
    child.stop(grace=0)
    assert not folder.exists()


def test_long_temporary_paths_are_not_used_for_sockets(tmp_path, monkeypatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    child: Child[Say] = Child(ME, Say, "test child")
    assert ask(child, "hello") == "hello"
    child.stop(grace=0)
    assert list(long.iterdir()) == []


def test_what_the_child_prints_stays_out_of_our_output(capfd) -> None:
    child: Child[Say] = Child(ME, Say, "test child")
    assert ask(child, "print") == "printed"
    child.channel.send(Ask("end"))
    child.stop()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "noise" in captured.err


def test_last_words_come_before_the_end(child: Child[Say]) -> None:
    assert ask(child, "last words") == "goodbye"
    with pytest.raises(EngineDeadError, match=r"the test child \(pid \d+\) ended with exit code 7"):
        child.receive(10)


def test_a_stopped_child_says_so(child: Child[Say]) -> None:
    child.channel.send(Ask("end"))
    child.stop()
    child.stop()
    assert not child.is_open
    with pytest.raises(EngineDeadError, match="shut down"):
        child.check()


def test_a_child_that_cannot_even_start_is_noticed() -> None:
    child: Child[Say] = Child("tests.foundation.no_such_module", Say, "test child")
    child.channel.send(Ask("hello"))  # must not wait for a reader that never comes
    with pytest.raises(EngineDeadError, match="ended with exit code 1"):
        child.receive(PATIENCE)
    child.stop()


def test_the_thread_that_started_a_child_may_end() -> None:
    made: list[Child[Say]] = []
    thread = threading.Thread(target=lambda: made.append(Child(ME, Say, "test child")))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert ask(made[0], "hello") == "hello"
    made[0].stop(grace=0)


@pytest.mark.parametrize("error", [
    InputError("temperature must be >= 0", "temperature"), ConfigError("no such model", "model"),
    WeightsError("missing: a, b"), DoesNotFitError("1 GiB short", "max_model_len"), EngineDeadError("gone"),
])  # fmt: skip
def test_errors_arrive_as_what_they_were(error: QuireError) -> None:
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(Failure.of(error)), type=Failure).error()
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert getattr(back, "param", None) == getattr(error, "param", None)
    assert getattr(back, "field", None) == getattr(error, "field", None)


def test_foreign_errors_arrive_as_their_name_and_first_line() -> None:
    assert str(Failure.of(RuntimeError("out of memory\nmany\nlines")).error()) == "RuntimeError: out of memory"
    assert str(Failure.of(KeyboardInterrupt()).error()) == "KeyboardInterrupt"
    assert type(Failure.of(WireError("odd bytes")).error()) is QuireError


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    sys.exit(main(sys.argv[1:]))
