"""Schemas and tags as JSON text, which is what travels."""

from __future__ import annotations

import json
from typing import Any

from quire.foundation.errors import InputError


def json_text(given: Any, max_bytes: int | None, field: str, what: str) -> str:
    """The JSON of what is a value, or text already. what: it is, says the error. Raises InputError."""
    try:
        text = str(given) if isinstance(given, str) else json.dumps(given, ensure_ascii=False, separators=(",", ":"))
        size = len(text.encode())
    except RecursionError:
        raise InputError(f"{field}: {what} at $ is nested too deeply", field) from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{field}: {what} is not valid JSON: {error}", field) from None
    if max_bytes is not None and size > max_bytes:
        raise InputError(f"{field}: {what} at $ is longer than {max_bytes // 1024} KiB", field)
    return text
