"""`quire run-batch` on the demo model: killed, started again, given what it cannot use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import PATIENCE, ROOT, wait_until

COMMAND = [sys.executable, "-m", "quire.cli.main", "run-batch"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
NUM_LINES = 60


def request(number: int) -> dict[str, Any]:
    if number % 2:
        body = {"messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 30, "ignore_eos": True}
        return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    body = {"prompt": f"Once {number}", "max_tokens": 30, "ignore_eos": True}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def start(source: Path, target: Path, *options: str) -> subprocess.Popen[str]:
    arguments = [*COMMAND, "-i", str(source), "-o", str(target), "--device", "cpu", "--dtype", "float32"]
    arguments += ["--num-gpu-blocks-override", "600", *options]
    return subprocess.Popen(
        arguments, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.long  # as `test_batches.py` kills the server that does it
def test_it_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = {"custom_id": "wrong", "method": "POST", "url": "/v1/nothing", "body": {}}
    source.write_text("".join(json.dumps(r) + "\n" for r in [*map(request, range(NUM_LINES)), bad]))
    first = start(source, target, "--max-num-seqs", "2")
    assert wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 10)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert target.read_bytes().count(b"\n") < NUM_LINES
    second = start(source, target)
    out, err = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, err
    assert f"{NUM_LINES + 1} requests: {NUM_LINES} answered, 1 failed" in out
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(r["custom_id"] for r in results) == sorted([f"line-{n}" for n in range(NUM_LINES)] + ["wrong"])
    for result in results:
        if result["custom_id"] == "wrong":
            assert "/v1/chat/completions" in result["error"]["message"]
        else:
            assert result["response"]["status_code"] == 200
            assert result["response"]["body"]["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("none.jsonl", "out.jsonl", "cannot be read"),
        ("in.jsonl", "in.jsonl", "another file"),
        ("in.jsonl", "notes.txt", "something else than results"),
        ("in.jsonl", "none/out.jsonl", "cannot be written"),
        ("in.jsonl", "pipe", "a file on a disk"),
        pytest.param("pipe", "out.jsonl", "a file on a disk", marks=pytest.mark.long),
        pytest.param("https://host/in.jsonl", "out.jsonl", "path of a file", marks=pytest.mark.long),
    ],
)
def test_files_it_cannot_use(tmp_path: Path, source: str, target: str, said: str) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(request(0)) + "\n")
    (tmp_path / "notes.txt").write_text("remember the milk\n")
    os.mkfifo(tmp_path / "pipe")
    given = source if "://" in source else str(tmp_path / source)
    done = subprocess.run(
        [*COMMAND, "-i", given, "-o", str(tmp_path / target)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "remember the milk\n"
