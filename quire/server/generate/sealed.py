"""Reasoning and summaries that the client keeps for us between turns, as a string that is opaque to it (not secret)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib

_PREFIX = "quire1."
MAX_BYTES = 16 * 1024 * 1024  # of an unsealed text


def seal(text: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def unseal(sealed: str) -> str | None:
    """The text; None for a string that `seal` did not make."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        packed = base64.urlsafe_b64decode(sealed.removeprefix(_PREFIX))
        return zlib.decompressobj().decompress(packed, MAX_BYTES).decode()
    except (binascii.Error, zlib.error, ValueError):
        return None


def signature(text: str) -> str:
    """The same for the same text, always."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
