"""Byte code of packages that were installed without it."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from quire.foundation.folders import cache_folder


def keep_bytecode(package: str) -> None:
    """Let Python keep what it compiles in a folder of ours, if `package` has no byte code and would never get any.

    Images are often built without byte code, and read-only or with PYTHONDONTWRITEBYTECODE. The thousand modules that
    torch imports are then compiled at every start, which takes seconds. To be called before the package is imported,
    and in processes of our own only (commands, cores, workers): it changes how all of the process imports.
    """
    if package in sys.modules or sys.pycache_prefix is not None:
        return
    spec = find_spec(package)
    if spec is None or spec.cached is None or os.path.exists(spec.cached):
        return
    if sys.dont_write_bytecode or not os.access(Path(spec.cached).parent.parent, os.W_OK):
        sys.pycache_prefix = str(cache_folder() / "bytecode")
        sys.dont_write_bytecode = False
