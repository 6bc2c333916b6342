"""The worker's package says how long OpenMP may spin before torch, and with it OpenMP, is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import os, sys
import quire.executor.base
from quire.foundation.registry import load
assert "torch" not in sys.modules
before = os.environ.get("GOMP_SPINCOUNT")
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(before, os.environ.get("GOMP_SPINCOUNT"))
sys.meta_path.insert(0, Watch())
load(quire.executor.base.WORKER)
"""


def spins(environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    return done.stdout.splitlines()[-1]  # where it is imported; it is looked up before


def test_set_before_torch_is_imported() -> None:
    assert spins({}) == "None 3000"


def test_the_users_own_value_stays() -> None:
    assert spins({"GOMP_SPINCOUNT": "7"}) == "7 7"
