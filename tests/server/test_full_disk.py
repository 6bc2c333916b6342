"""/v1/files and /v1/batches when the disk has no room: what is refused, told and cleaned up."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.server.batches import journal, store
from tests.server.conftest import Served, echo_server
from tests.server.process import wait_until

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello", "max_tokens": 3}}


class Disk:
    """Whether files of the given names have no room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full_for: tuple[str, ...] = ()
        sync, write = os.fsync, os.write

        def checked_sync(file: int) -> None:
            if os.readlink(f"/proc/self/fd/{file}").endswith(self.full_for):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(file)

        def checked_write(file: int, content: Any) -> int:
            if os.readlink(f"/proc/self/fd/{file}").endswith(self.full_for):
                write(file, content[:10])  # what a full disk takes before it says so
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, content)

        monkeypatch.setattr(store.os, "fsync", checked_sync)
        monkeypatch.setattr(journal.os, "write", checked_write)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with echo_server(batch_dir=str(tmp_path)) as served:
        yield served


def upload(served: Served, *, status: int = 200) -> str:
    files = {"file": ("a.jsonl", json.dumps(LINE).encode() + b"\n"), "purpose": (None, "batch")}
    reply = served.client.post("/v1/files", files=files)
    assert reply.status_code == status, reply.text
    return str(reply.json().get("id"))


def submit(served: Served, file_id: str, *, status: int = 200) -> str:
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    reply = served.client.post("/v1/batches", json=body)
    assert reply.status_code == status, reply.text
    return str(reply.json().get("id"))


@pytest.mark.parametrize("full_for", [".data", ".new"], ids=["bytes", "record"])
def test_a_file_that_cannot_be_kept_leaves_nothing(served: Served, disk: Disk, tmp_path: Path, full_for: str) -> None:
    disk.full_for = (full_for,)
    upload(served, status=507)
    assert not list((tmp_path / "files").iterdir())
    disk.full_for = ()
    upload(served)


def test_a_batch_that_cannot_be_kept_is_refused(served: Served, disk: Disk, tmp_path: Path) -> None:
    file_id = upload(served)
    disk.full_for = (".new",)
    submit(served, file_id, status=507)
    assert not list((tmp_path / "batches").iterdir())
    assert served.client.get("/v1/batches").json()["data"] == []


@pytest.mark.parametrize("full_for", ["-output.data", "-output.new"], ids=["answers", "record"])
def test_a_batch_whose_results_have_no_room_fails_and_says_so(
    served: Served, disk: Disk, tmp_path: Path, full_for: str
) -> None:
    disk.full_for = (full_for,)
    batch = submit(served, upload(served))
    assert wait_until(lambda: served.client.get(f"/v1/batches/{batch}").json()["status"] == "failed")
    [problem] = served.client.get(f"/v1/batches/{batch}").json()["errors"]["data"]
    assert "No space left" in problem["message"]
    for results in (tmp_path / "files").glob("*-output.data"):
        assert all(json.loads(line) for line in results.read_text().splitlines()), "half a line was left"


def test_a_batch_can_be_cancelled_on_a_full_disk(served: Served, disk: Disk) -> None:
    served.llm.delay = 0.05
    long = {**LINE, "body": {"prompt": "hello", "max_tokens": 2000}}
    files = {"file": ("a.jsonl", json.dumps(long).encode() + b"\n"), "purpose": (None, "batch")}
    batch = submit(served, served.client.post("/v1/files", files=files).json()["id"])
    assert wait_until(lambda: served.client.get(f"/v1/batches/{batch}").json()["status"] == "in_progress")
    disk.full_for = (".new",)
    assert served.client.post(f"/v1/batches/{batch}/cancel").status_code == 200
    over = ("cancelled", "failed")  # the end cannot be saved either
    assert wait_until(lambda: served.client.get(f"/v1/batches/{batch}").json()["status"] in over)
    assert wait_until(lambda: not served.service.in_flight.tasks)
