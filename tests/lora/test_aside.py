"""Adapters are read beside the steps: whoever asked for one waits, and those that run go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.engine.core import EngineCore
from quire.engine.messages import Abort, Add, News, UtilityCall, UtilityReply
from quire.executor.base import WORKER
from quire.executor.in_process import InProcessExecutor
from quire.frontend.adapters import read_adapter
from quire.models.adapters.model import AdaptedModel, ReadAdapter
from quire.types.adapter import Adapter, LoRARequest
from quire.types.output import EngineOutput
from tests.engine.echo_worker import make_request
from tests.engine.test_core import ListInbox
from tests.lora.adapters import simple
from tests.lora.test_engines import OPTIONS
from tests.models import checkpoints


class Gate:
    """Adapters' files seem to take until it opens; they are really read then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.reads = threading.Event(), 0
        begin = AdaptedModel.begin

        def slowly(model: AdaptedModel, folder: Path, max_rank: int) -> ReadAdapter:
            self.reads += 1
            assert self.is_open.wait(60)
            return begin(model, folder, max_rank)

        monkeypatch.setattr(AdaptedModel, "begin", slowly)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.make("Llama"), tmp_path_factory.mktemp("base"))


class Engine:
    """A core whose turns are counted."""

    def __init__(self, base: Path, **options: Any) -> None:
        resolved = resolve(EngineConfig.from_flat(model=str(base), **{**OPTIONS, **options}))
        self.core = EngineCore(resolved, InProcessExecutor(resolved, WORKER))
        self.info = self.core.start()
        self.outputs: list[EngineOutput] = []
        self.replies: list[UtilityReply] = []

    def adapter(self, folder: Path, name: str = "a") -> Adapter:
        return read_adapter(LoRARequest(name, 1, str(folder)), self.info)

    def turn(self, *messages: Any) -> None:
        for reply in self.core.turn(ListInbox(*messages), 0.0):
            if isinstance(reply, News):
                self.outputs += reply.outputs.each()
            elif isinstance(reply, UtilityReply):
                self.replies.append(reply)

    def run(self) -> None:
        while self.core.has_work:
            self.turn()

    def ids(self, request_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.token_ids]

    def end(self, request_id: str) -> EngineOutput:
        return next(o for o in self.outputs if o.request_id == request_id and o.finish_reason)


@pytest.fixture
def engine(base: Path) -> Iterator[Engine]:
    engine = Engine(base)
    yield engine
    engine.core.shutdown()


def test_who_runs_goes_on_and_who_asked_follows(engine: Engine, gate: Gate, tmp_path: Path) -> None:
    """A load, a second one of the same, and requests with it at once; all are served when it is there."""
    adapter = engine.adapter(simple(tmp_path / "a"))
    engine.turn(Add(make_request("stream", [5, 17, 3], 60)))
    engine.turn(
        UtilityCall(1, "load_adapter", list(adapter.fields())),
        Add(make_request("with", [5, 17, 3], 8, lora=adapter)),
        UtilityCall(2, "load_adapter", list(adapter.fields())),
        Add(make_request("gone", [5, 17, 3], 8, lora=adapter)),
    )
    for _ in range(20):
        engine.turn()
    assert len(engine.ids("stream")) >= 18
    assert gate.reads == 1
    assert not engine.replies
    assert not engine.ids("with")
    engine.turn(Abort(["gone"]), UtilityCall(3, "drop_adapter", [adapter.key]))  # while it is read
    gate.is_open.set()
    engine.run()
    assert [(reply.number, reply.failure) for reply in engine.replies] == [(3, None), (1, None), (2, None)]
    assert len(engine.ids("stream")) == 60
    assert not engine.ids("gone")
    engine.turn(Add(make_request("alone", [5, 17, 3], 8, lora=adapter)))
    engine.run()
    assert engine.ids("with") == engine.ids("alone") != engine.ids("stream")[:8]


def test_what_is_wrong_is_told_to_all_who_asked(engine: Engine, gate: Gate, tmp_path: Path) -> None:
    adapter = engine.adapter(simple(tmp_path / "a", target_modules=["self_attn.q_proj", "w_pack"]))
    engine.turn(Add(make_request("stream", [5, 17, 3], 30)))
    engine.turn(UtilityCall(1, "load_adapter", list(adapter.fields())), Add(make_request("with", [5], 8, lora=adapter)))
    gate.is_open.set()
    engine.run()
    wanted = "target_modules has 'w_pack', and the model has no such module"
    assert wanted in str(engine.replies[0].failure)
    assert wanted in str(engine.end("with").error)
    assert len(engine.ids("stream")) == 30


def test_where_nothing_runs_it_is_waited_for(engine: Engine, tmp_path: Path) -> None:
    adapter = engine.adapter(simple(tmp_path / "a"))
    engine.turn(UtilityCall(1, "load_adapter", list(adapter.fields())))
    assert [reply.number for reply in engine.replies] == [1]


def test_who_runs_may_end_before_it_is_read(engine: Engine, gate: Gate, tmp_path: Path) -> None:
    """Then nothing else is to be done, and it is waited for."""
    adapter = engine.adapter(simple(tmp_path / "a"))
    engine.turn(Add(make_request("stream", [5, 17, 3], 4)))
    engine.turn(Add(make_request("with", [5, 17, 3], 8, lora=adapter)))
    threading.Timer(0.5, gate.is_open.set).start()
    engine.run()
    assert len(engine.ids("stream")) == 4
    assert len(engine.ids("with")) == 8


def test_those_that_wait_for_one_are_in_the_queue(base: Path, gate: Gate, tmp_path: Path) -> None:
    engine = Engine(base, max_num_seqs=1, max_num_queued_reqs=1)
    adapter = engine.adapter(simple(tmp_path / "a"))
    engine.turn(Add(make_request("stream", [5, 17, 3], 30)))
    engine.turn()
    engine.turn(*(Add(make_request(name, [5], 4, lora=adapter)) for name in ("first", "second")))
    gate.is_open.set()
    engine.run()
    assert "the queue is full" in str(engine.end("second").error)
    assert len(engine.ids("first")) == 4
    engine.core.shutdown()
