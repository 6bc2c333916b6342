"""Packages without byte code are compiled once, others are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from quire.foundation.bytecode import keep_bytecode
keep_bytecode("heavy")
import heavy.part
print(sys.pycache_prefix, heavy.part.__cached__)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "site/heavy").mkdir(parents=True)
    (tmp_path / "site/heavy/__init__.py").write_text("")
    (tmp_path / "site/heavy/part.py").write_text("value = 1\n")
    return tmp_path


def start(folder: Path, **env: str) -> tuple[str, Path]:
    """A process that imports the package: Python's prefix for byte code, and where it looked for that of a module."""
    path = os.pathsep.join([str(folder / "site"), *sys.path])
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env = {**clean, "PYTHONPATH": path, "QUIRE_CACHE_DIR": str(folder / "cache"), **env}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True, timeout=60)
    prefix, cached = done.stdout.split()
    return prefix, Path(cached)


def test_it_is_kept_where_it_would_be_thrown_away(folder: Path) -> None:
    prefix, cached = start(folder, PYTHONDONTWRITEBYTECODE="1")
    assert prefix == str(folder / "cache/bytecode")
    assert cached.is_relative_to(prefix)
    written = cached.stat().st_mtime_ns
    assert start(folder, PYTHONDONTWRITEBYTECODE="1") == (prefix, cached)
    assert cached.stat().st_mtime_ns == written, "it was compiled again"


def test_python_is_left_to_itself_where_it_keeps_it(folder: Path) -> None:
    for env in ({}, {"PYTHONDONTWRITEBYTECODE": "1"}):  # the first writes it, the second finds it
        prefix, cached = start(folder, **env)
        assert prefix == "None"
        assert cached.is_relative_to(folder / "site")
        assert cached.exists()


def test_the_users_own_prefix_stays(folder: Path) -> None:
    assert start(folder, PYTHONPYCACHEPREFIX=str(folder / "own"))[0] == str(folder / "own")


def test_commands_keep_it_for_torch(tmp_path: Path) -> None:
    """A torch without byte code in a place that nobody writes to; the command says where Python looks."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    (tmp_path / "command.py").write_text("import sys\ndef run(arguments):\n    print(sys.pycache_prefix)\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from quire.cli.main import run_command\nassert run_command('command', []) == 0"
    environment = {**os.environ, "QUIRE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == str(tmp_path / "cache/bytecode")
