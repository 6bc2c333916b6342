"""Where Quire keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Quire's folder in the user's cache: QUIRE_CACHE_DIR, or as XDG_CACHE_HOME says."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("QUIRE_CACHE_DIR") or Path(base, "quire")).expanduser()
