"""Uploaded files and batches on disk. What is there survives the process, whichever way it ends.

    DIR/lock                    held by the one server that uses the directory
    DIR/files/ID.json, ID.data  a file: what is known of it, and its bytes
    DIR/batches/ID.json         a batch

A .json is replaced as a whole and is there last: without one a .data is no file (yet).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from quire.foundation.errors import ConfigError
from quire.foundation.folders import cache_folder
from quire.foundation.log import get_logger

log = get_logger(__name__)

FINAL = frozenset({"completed", "failed", "cancelled"})


class File(msgspec.Struct, kw_only=True):
    """As the API shows it. Times are Unix seconds."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"


class LineCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchJob(msgspec.Struct, kw_only=True):
    """As the API shows it. `model`: whose server made it, and which its lines ask."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: LineCounts = msgspec.field(default_factory=LineCounts)
    metadata: dict[str, str] | None = None

    def become(self, status: str) -> None:
        self.status = status
        setattr(self, f"{status}_at", now())

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def result_ids(self) -> tuple[str, str]:
        """Of the files with the answers and with the failures; they need not exist."""
        number = self.id.removeprefix("batch_")
        return f"file-{number}-output", f"file-{number}-errors"


class BatchStore:
    """Raises ConfigError if the directory cannot be used, or another server uses it."""

    def __init__(self, folder: Path) -> None:
        self._files, self._batches = folder / "files", folder / "batches"
        try:
            for one in (self._files, self._batches):
                one.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600)  # held as long as the store
        except OSError as error:
            raise ConfigError(f"batch_dir {str(folder)!r} cannot be used: {error}", "batch_dir") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"batch_dir {str(folder)!r} is in use by another server: give this one a directory of its own",
                "batch_dir",
            ) from None
        self.files = {file.id: file for file in _read_all(self._files, File)}
        self.batches = {batch.id: batch for batch in _read_all(self._batches, BatchJob)}
        self._forget_remains()

    def close(self) -> None:
        """Another server may have the directory."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def data(self, file_id: str) -> Path:
        """Where the bytes of a file are, or will be."""
        return self._files / f"{file_id}.data"

    def upload(self, content: IO[bytes], filename: str, purpose: str) -> File:
        """Keep a copy. Raises OSError if the disk is full."""
        file_id = f"file-{secrets.token_hex(12)}"
        path = self.data(file_id)
        try:
            with open(path, "wb") as target:
                shutil.copyfileobj(content, target, 1024 * 1024)
                target.flush()
                os.fsync(target.fileno())
            return self.publish(file_id, filename, purpose)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def publish(self, file_id: str, filename: str, purpose: str) -> File:
        """Make a file of the data that lies there. Raises OSError if the disk is full."""
        size = self.data(file_id).stat().st_size
        file = File(id=file_id, bytes=size, created_at=now(), filename=filename, purpose=purpose)
        _replace(self._files / f"{file_id}.json", file)
        self.files[file_id] = file
        return file

    def delete(self, file_id: str) -> None:
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        self.data(file_id).unlink(missing_ok=True)
        self.files.pop(file_id, None)

    def save(self, batch: BatchJob) -> None:
        """A new batch, or what became of it. Raises OSError if the disk is full."""
        _replace(self._batches / f"{batch.id}.json", batch)
        self.batches[batch.id] = batch

    def unfinished(self) -> list[BatchJob]:
        """The oldest first."""
        return sorted((b for b in self.batches.values() if not b.is_final), key=lambda b: b.created_at)

    def _forget_remains(self) -> None:
        """Data of uploads that were cut off; the results so far of unfinished batches stay."""
        growing = {file_id for batch in self.unfinished() for file_id in batch.result_ids}
        for path in self._files.glob("*.data"):
            if path.stem not in self.files and path.stem not in growing:
                path.unlink(missing_ok=True)


def now() -> int:
    return int(time.time())


def default_folder() -> Path:
    return cache_folder() / "batches"


Record = TypeVar("Record", File, BatchJob)


def _read_all(folder: Path, kind: type[Record]) -> list[Record]:
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
        except (OSError, msgspec.MsgspecError) as error:
            log.error("%s cannot be read and is left out: %s", path, error)
    return found


def _replace(path: Path, record: File | BatchJob) -> None:
    """The old one or the new one is there, also after a power cut."""
    fresh = path.with_suffix(".new")
    try:
        with open(fresh, "wb") as target:
            target.write(msgspec.json.encode(record))
            target.flush()
            os.fsync(target.fileno())
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
