"""Checks on text from outside."""

from __future__ import annotations

from quire.foundation.errors import InputError

CHARS_A_TOKEN = 16  # of the context, and no less than MIN_CHARS: a prompt of more is refused unread
MIN_CHARS = 1024 * 1024


def most_chars(context: int) -> int:
    """Characters that a prompt may have. context: tokens (max_model_len)."""
    return max(MIN_CHARS, CHARS_A_TOKEN * context)


def check_text(text: str, param: str) -> None:
    """Raises InputError for text that cannot be UTF-8 (lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InputError(
            f"{param} is not valid Unicode: lone surrogate U+{code:04X} at character {error.start}", param
        ) from None
