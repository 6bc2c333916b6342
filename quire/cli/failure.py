"""How a command fails: what is wrong, what to do, where more is said, in a few lines."""

from __future__ import annotations

import sys
import traceback

from quire.foundation.error_codes import NO_ROOM, entry_of
from quire.foundation.errors import ConfigError, DoesNotFitError, EngineDeadError, InputError, QuireError
from quire.foundation.log import escaped

MOST_LINES = 10  # of a message; all with the lines around it are at most 15
_PACKAGES = {
    "aiohttp": "quire[bench]",
    "matplotlib": "quire[bench]",
    **dict.fromkeys(
        ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client", "pydantic", "python_multipart"), "quire"
    ),
}


def exit_code(error: Exception) -> int:
    """1 failed, 2 a bad option, model or package, 3 does not fit in memory, 4 the engine died."""
    if isinstance(error, DoesNotFitError):
        return 3
    if isinstance(error, ConfigError | InputError | ModuleNotFoundError):
        return 2
    return 4 if isinstance(error, EngineDeadError) else 1


def tell(error: Exception, *, is_verbose: bool) -> None:
    """Write the error to stderr: its message, the remedy of its kind, its code."""
    entry = entry_of(error)
    if is_verbose:
        traceback.print_exception(error, file=sys.stderr)
    lines = _message(error).splitlines() or [type(error).__name__]
    if len(lines) > MOST_LINES and not is_verbose:
        lines[MOST_LINES - 1 :] = [f"  ... and {len(lines) - MOST_LINES + 1} lines more: -v shows them"]
    remedy = entry.remedy if "](" not in entry.remedy else plain(entry.remedy)
    print("quire: error: " + "\n".join(escaped(line) for line in lines), file=sys.stderr)
    print(f"  {remedy}\n  ({entry.code}: `quire explain {entry.code}` says more)", file=sys.stderr)


def plain(text: str) -> str:
    """Links of a page as they are read in a terminal: `[the models](models.md)` is the models (docs/models.md)."""
    parts = text.split("[")
    told = parts[0]
    for part in parts[1:]:
        words, closed, rest = part.partition("](")
        target, _, rest = rest.partition(")")
        told += f"{words} (docs/{target}){rest}" if closed else f"[{part}"
    return told


def _message(error: Exception) -> str:
    if isinstance(error, EngineDeadError):
        return f"the engine stopped: {error}"
    if isinstance(error, QuireError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = _PACKAGES.get(error.name.partition(".")[0])
        return f"{error.name!r} is not installed" + (f": pip install '{package}'" if package else "")
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return f"cannot be written: {error.strerror}" + (f": {error.filename!r}" if error.filename else "")
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"internal error: {type(error).__name__}: {error}{where}"
