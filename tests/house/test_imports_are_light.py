"""What a user pays before anything happens: importing the brain must not import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["quire", "quire.engine.core", "quire.frontend.async_engine", "quire.cli.main"])
def test_importing_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
