"""Results of a batch on their way to disk: a line each, written once, in any order."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import orjson

from quire.foundation.errors import InputError
from quire.server.batches.store import LineCounts


class Journal:
    """Appends to a file of answers and one of failures (which may be the same), on a thread of its own.

    What the files hold already counts as done; a last line that was cut off is cut away. `counts`: what is on disk.
    Raises InputError if a file holds something else than results.
    """

    def __init__(self, answers: Path, failures: Path) -> None:
        self.done: set[str] = set()
        self.counts = LineCounts()
        for path in {answers, failures}:
            self._read(path)
        self._files = {
            path: os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) for path in {answers, failures}
        }
        self._targets = (self._files[failures], self._files[answers])
        self._news: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="quire-batch-journal", daemon=True)
        self._thread.start()

    def add(self, record: dict[str, Any]) -> None:
        """`record` as the result files hold it. Raises OSError if an earlier one could not be written."""
        if self._error is not None:
            raise self._error
        self._news.put(record)

    def close(self) -> None:
        """Returns when all is on disk. Raises OSError if it is not."""
        if self._thread.is_alive():
            self._news.put(None)
            self._thread.join()
        for file in self._files.values():
            os.close(file)
        self._files = {}
        if self._error is not None:
            raise self._error

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        whole = 0
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                try:
                    record = orjson.loads(line)
                    self._count(record)
                except (orjson.JSONDecodeError, TypeError, KeyError):
                    raise InputError(
                        f"{path} holds something else than results of a batch: {line[:80]!r}", "output_file"
                    ) from None
        os.truncate(path, whole)

    def _count(self, record: dict[str, Any]) -> None:
        self.done.add(record["id"])
        if record["error"] is None:
            self.counts.completed += 1
        else:
            self.counts.failed += 1

    def _work(self) -> None:
        """Writes what has come in the meantime, then waits for the disk once."""
        is_open = True
        while is_open:
            news = [self._news.get()]
            while not self._news.empty():
                news.append(self._news.get())
            is_open = news[-1] is not None
            records = [record for record in news if record is not None]
            try:
                for target in set(self._targets):
                    lines = [orjson.dumps(r) + b"\n" for r in records if self._targets[r["error"] is None] == target]
                    if lines:
                        _write(target, b"".join(lines))
                        os.fsync(target)
            except OSError as error:
                self._error = error
                return
            for record in records:
                self._count(record)


def _write(file: int, content: bytes) -> None:
    """All of it or nothing. Raises OSError."""
    before = os.fstat(file).st_size
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(file, view) :]
    except OSError:
        os.ftruncate(file, before)
        raise
