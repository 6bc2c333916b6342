"""Checks on text from outside."""

from __future__ import annotations

from quire.foundation.errors import InputError


def check_text(text: str, param: str) -> None:
    """Raises InputError for text that cannot be UTF-8 (lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InputError(
            f"{param} is not valid Unicode: lone surrogate U+{code:04X} at character {error.start}", param
        ) from None
