"""The flight record: what an engine did last, in a file, for whoever has to find out why it died.

Numbers and ids only, never text or tokens.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from quire.foundation.folders import cache_folder
from quire.foundation.log import get_logger

KEPT = 20  # files; the oldest go first
_log = get_logger(__name__)


def record_folder(option: str | None) -> Path:
    """As the option flight_record_dir says it."""
    return cache_folder() / "records" if option is None else Path(option).expanduser()


def write_record(folder: Path, cause: str, contents: dict[str, Any]) -> str | None:
    """The path of the file; None, and a line in the log, if it cannot be written."""
    record = {"cause": cause, "time": time.time(), "pid": os.getpid(), **contents}
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = folder / f"record-{stamp}-{os.getpid()}-{time.monotonic_ns() % 1_000_000:06d}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
        for old in sorted(folder.glob("record-*.json"))[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("the flight record cannot be written: %s", error)
        return None
    return str(path)
