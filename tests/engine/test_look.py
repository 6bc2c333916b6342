"""What a core shows to who looks in: blocks that add up, steps, lives; and the record that it leaves when it dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.engine.core import EngineCore
from quire.engine.messages import Abort
from quire.kv import cells
from quire.scheduling.lives import Lives
from quire.types.view import CHUNK, ENDED, PREEMPTED, SEATED, BlockCells, EngineView
from tests.engine.echo_worker import make_request
from tests.engine.test_core import ListInbox, make_core

PROMPT = list(range(100, 170))


def turns(core: EngineCore, count: int) -> None:
    for _ in range(count):
        core.turn(ListInbox(), 0)


def check_cells(found: BlockCells, core: EngineCore) -> None:
    stats = core.stats()
    assert found.num_blocks == stats.num_blocks
    assert sum(found.held) == stats.num_blocks - stats.num_free_blocks
    assert len(found.held) == len(found.owner) == len(found.shared) == len(found.cached)
    for owner, held, shared, cached in zip(found.owner, found.held, found.shared, found.cached, strict=True):
        assert shared <= held
        assert held + cached <= found.per_cell
        assert (owner >= 0) == (held > 0)


@pytest.mark.parametrize("max_cells", [4096, 7])
def test_the_blocks_are_those_that_are_held(max_cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells.block_cells, "__defaults__", (max_cells,))
    core = make_core(1, max_num_seqs=4)
    check_cells(core.look().cells, core)
    for i in range(6):
        core.add(make_request(f"r{i}", [*PROMPT, i], 40))
    turns(core, 6)
    view = core.look()
    check_cells(view.cells, core)
    assert sum(view.cells.shared) > 0  # they begin alike
    assert [(each.id, each.status) for each in view.requests] == [
        *((f"r{i}", "running") for i in range(4)), ("r4", "waiting"), ("r5", "waiting")]  # fmt: skip
    assert view.num_requests == 6
    assert all(each.blocks for each in view.requests[:4])
    turns(core, 200)
    view = core.look()
    check_cells(view.cells, core)
    assert sum(view.cells.held) == 0
    assert sum(view.cells.cached) > 0
    assert msgspec.convert(msgspec.to_builtins(view), EngineView) == view  # as it comes over a wire


def test_steps_are_told_from_where_one_knows_them() -> None:
    core = make_core(1)
    core.add(make_request("a", PROMPT, 10))
    turns(core, 4)
    first = core.look().steps
    assert [step.step for step in first] == list(range(4))
    assert [step.prompt_tokens for step in first] == [64, len(PROMPT) - 64, 0, 0]
    assert [step.decodes for step in first] == [0, 0, 1, 1]
    turns(core, 2)
    assert [step.step for step in core.look(first[-1].ended).steps] == [4, 5]
    stats = core.stats()
    core._steps.tell(stats)
    assert len(stats.step_tokens) == len(stats.step_seconds) == len(stats.step_gaps) > 0


def test_a_life_is_kept_while_somebody_watches_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(1, max_prefill_chunk=32)
    core.add(make_request("before", PROMPT, 5))
    turns(core, 20)
    assert core._scheduler.life("before") is None
    core.look(watch=60.0)
    core.add(make_request("seen", PROMPT, 5, given=[]))
    core.add(make_request("gone", [1, 2, 3], 500))
    turns(core, 2)
    core.turn(ListInbox(Abort(["gone"])), 0)
    turns(core, 20)
    life = core._scheduler.life("seen")
    assert life is not None
    assert [event.what for event in life] == [SEATED, *[CHUNK] * (len(life) - 2), ENDED]
    chunks = [event for event in life if event.what == CHUNK]
    assert chunks[0].first == life[0].first  # behind what was cached
    assert chunks[-1].last == len(PROMPT)
    assert life[-1].first == len(PROMPT) + 5
    assert [event.at for event in life] == sorted(event.at for event in life)
    gone = core._scheduler.life("gone")
    assert gone is not None
    assert gone[-1].what == ENDED
    monkeypatch.setattr("quire.scheduling.lives.time.monotonic", lambda: float("inf"))
    core.add(make_request("after", PROMPT, 5))
    turns(core, 20)
    assert core._scheduler.life("after") is None


def test_a_preempted_request_says_so() -> None:
    core = make_core(1, num_gpu_blocks_override=12)
    core.look(watch=60.0)
    for i in range(3):
        core.add(make_request(f"r{i}", [i] * 20, 60))
    turns(core, 400)
    lives = [core._scheduler.life(f"r{i}") or [] for i in range(3)]
    assert any(event.what == PREEMPTED for life in lives for event in life)
    assert all(life[-1].what == ENDED for life in lives)


def test_a_traced_request_brings_its_life_along() -> None:
    core = make_core(1)
    core.add(msgspec.structs.replace(make_request("a", PROMPT, 3), trace={"traceparent": "x"}))
    core.add(make_request("b", PROMPT, 3))
    told: dict[str, Any] = {}
    for _ in range(20):
        for message in core.turn(ListInbox(), 0):
            for output in message.outputs.special:  # type: ignore[union-attr]
                if output.finish_reason:
                    told[output.request_id] = output.life
    assert [event.what for event in told["a"]][:2] == [SEATED, CHUNK]
    assert told["b"] is None


def test_lives_are_forgotten_in_the_end() -> None:
    lives = Lives()
    assert lives.ended("nobody") is None


def test_a_dying_engine_leaves_a_record(tmp_path: Path) -> None:
    core = make_core(2, hf_overrides={"fail_at_step": 3}, flight_record_dir=str(tmp_path))
    core.add(make_request("secret-free", PROMPT, 50))
    while not core.stopped:
        core.turn(ListInbox(), 0)
    [file] = tmp_path.iterdir()
    record = json.loads(file.read_text())
    assert "step 3 failed" in record["cause"]
    assert [step[0] for step in record["look"]["steps"]] == [0, 1, 2]
    assert record["in_flight"][0]["step"] == 3  # the one that failed
    assert record["look"]["requests"][0][0] == "secret-free"
    assert str(PROMPT)[1:-1].replace(" ", "") not in file.read_text().replace(" ", "").replace("\n", "")


def test_a_record_that_cannot_be_written_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    core = make_core(1, hf_overrides={"fail_at_step": 1}, flight_record_dir=str(tmp_path / "file" / "sub"))
    core.add(make_request("a", [1], 50))
    while not core.stopped:
        core.turn(ListInbox(), 0)
    assert core.stopped
