"""Prompts of files through replicas on a Ray cluster: every row is answered once, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire import SamplingParams
from quire.foundation.errors import ConfigError
from quire.ray import Generate, Summary, answer_files, read_shard, shards_of, write_shard

ENGINE: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_num_seqs": 32}
PARAMS = SamplingParams(max_tokens=4, temperature=0)


def write_lines(path: Path, count: int, **more: Any) -> None:
    path.write_text("".join(json.dumps({"id": i, "prompt": f"Number {i} is", **more}) + "\n" for i in range(count)))


def answers(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("part-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_shards_are_the_rows_of_a_file(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    write_lines(lines, 10)
    lines.write_text(lines.read_text().replace("\n", "\n\n", 3))  # empty lines are no rows
    shards = list(shards_of(0, str(lines), 4))
    assert [(shard.start, shard.count) for shard in shards] == [(0, 4), (4, 4), (8, 2)]
    assert [row["id"] for shard in shards for row in read_shard(shard)] == list(range(10))
    pytest.importorskip("pyarrow")
    table = tmp_path / "b.parquet"
    write_shard(table, [{"id": i, "prompt": "x"} for i in range(10)])
    shards = list(shards_of(1, str(table), 4))
    assert [row["id"] for shard in shards for row in read_shard(shard)] == list(range(10))
    assert shards[1].name == "part-00001-000000000004.parquet"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.parquet"]


def test_a_stage_of_rows_and_of_conversations_and_rows_that_cannot_run() -> None:
    stage = Generate(sampling_params=PARAMS, **ENGINE)
    found = stage({"prompt": ["One", "word " * 5000, "Two"], "id": [1, 2, 3]})
    assert found["id"] == [1, 2, 3]
    assert [bool(error) for error in found["error"]] == [False, True, False]
    assert "too long" in found["error"][1]
    assert found["num_answer_tokens"][0] == 4
    assert stage({"messages": [[{"role": "user", "content": "Hi"}]]})["answer"][0]
    assert "a row has no 'prompt'" in stage({"text": ["x"]})["error"][0]
    several: list[tuple[dict[str, Any], str]] = [
        ({"messages": [{"role": "user", "content": "Hi"}], "prompt": None}, ""),
        ({"prompt": "Number 1 is", "messages": None}, ""),
        ({"prompt": [5, 6, 7]}, ""),
        ({"prompt": 5}, "prompt must be a string or token ids, got int"),
        ({"prompt": b"xy"}, "prompt must be a string or token ids, got bytes"),
        ({"messages": 5}, "messages must be a list, got int"),
        ({"messages": []}, "at least one message"),
        ({"prompt": None, "messages": None}, "a row has no 'prompt'"),
    ]
    found = stage.answer([row for row, _ in several])
    for (row, message), answer in zip(several, found, strict=True):
        assert bool(answer["answer"]) == (not message), row
        assert message in (answer["error"] or ""), row
    assert found[1] == stage.answer([{"prompt": "Number 1 is"}])[0]


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        answer_files(str(tmp_path / "*.jsonl"), str(tmp_path / "out"))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ConfigError, match=r"must be .parquet or .jsonl"):
        answer_files(str(tmp_path / "a.csv"), str(tmp_path / "out"))
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n[]\n')
    with pytest.raises(ConfigError, match="row 1"):
        read_shard(next(shards_of(0, str(tmp_path / "a.jsonl"), 9)))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", namespace="quire")
    yield
    ray.shutdown()


class Killer(threading.Thread):
    """Kills a replica, so many times, each once there are answers since the last."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.left = folder, times

    def run(self) -> None:
        seen = 0
        while self.left:
            time.sleep(0.05)
            done = len(list(self.folder.glob("part-*")))
            victims = [
                p for p in psutil.process_iter(["cmdline"]) if "ray::Replica" in " ".join(p.info["cmdline"] or [])
            ]
            if done > seen and victims:
                os.kill(victims[0].pid, signal.SIGKILL)
                seen, self.left = done, self.left - 1


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("rows", [2000])
def test_every_row_is_answered_once_though_replicas_are_killed(tmp_path: Path, rows: int) -> None:
    write_lines(tmp_path / "in.jsonl", rows)
    out = tmp_path / "out"
    killer = Killer(out, 2)
    killer.start()
    options: dict[str, Any] = {"sampling_params": PARAMS, "rows_per_shard": 100, "replicas": 2, **ENGINE}
    summary = answer_files(str(tmp_path / "in.jsonl"), str(out), **options)
    killer.join(1)
    assert killer.left == 0
    assert summary == Summary(rows, rows // 100, 0, 0)
    found = answers(out)
    assert Counter(row["id"] for row in found) == Counter(range(rows))
    assert all(row["answer"] and row["error"] is None for row in found)
    # Another run goes on where this one was ended.
    (out / "part-00000-000000000300.jsonl").unlink()
    assert answer_files(str(tmp_path / "in.jsonl"), str(out), **options) == Summary(
        rows, rows // 100, rows // 100 - 1, 0
    )
    assert sorted(map(str, answers(out))) == sorted(map(str, found))
    with pytest.raises(ConfigError, match="other rows_per_shard"):
        answer_files(str(tmp_path / "in.jsonl"), str(out), **{**options, "rows_per_shard": 7})
