"""Of the processes that share a folder of compiled kernels one compiles at a time; the others find its work there.

That is not for speed alone. The interpreter knows a library it has loaded by the number of its file. Where another
process puts a file of the same name into its place after that number was read and before the library is opened, the
number is free for the next file that is made, and who loads that is handed the library before: the launcher of another
kernel. Ranks that start at once with an empty folder are such processes.
"""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from typing import IO


class CompileLock:
    """Threads of this process hold it together; it is taken for the first of them and given back by the last."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "quire.lock"
        self._guard = threading.Lock()
        self._holders = 0
        self._file: IO[str] | None = None

    @property
    def was_taken(self) -> bool:
        """Ever, by anybody."""
        return self._path.exists()

    def __enter__(self) -> None:
        with self._guard:
            if not self._holders:
                self._file = self._take()
            self._holders += 1

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._holders -= 1
            if not self._holders and self._file is not None:
                self._file.close()
                self._file = None

    def _take(self) -> IO[str] | None:
        """None where there are no such locks."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("w", encoding="utf-8")
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            file.close()
            return None
        return file
