"""Logging: one line an event, as text or as JSON, to stderr."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from quire.foundation import env

_ROOT = "quire"
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def setup(level: str = "info", *, json_lines: bool | None = None) -> None:
    """Send the log of this process to stderr. QUIRE_LOG_LEVEL and QUIRE_LOG_JSON win. Calling it again replaces it."""
    as_json = env.LOG_JSON.get() if json_lines is None else json_lines
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel((env.LOG_LEVEL.get() or level).upper())
    root.propagate = False


def escaped(line: str) -> str:
    """Without control characters: what repeats a user's text shall do nothing to a terminal, nor forge a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    """The event's own fields; names that begin with _ are other libraries' business, as Ray's are."""
    return {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS and not key.startswith("_")}


class TextFormatter(logging.Formatter):
    """`12:00:01.250 INFO engine.core: message key=value`. Control characters are escaped: text of a user cannot
    forge a line. Only a traceback takes more than one line."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extras = "".join(f" {key}={value}" for key, value in _extras(record).items())
        place = record.name.removeprefix(_ROOT + ".")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {place}: {record.getMessage()}{extras}"
        line = escaped(line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (seconds), level, logger, pid, message, the event's own fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str, ensure_ascii=False)
