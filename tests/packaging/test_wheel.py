"""What is installed: the wheel's content, and a server from it in an environment that has nothing else."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import httpx
import pytest

import quire
from tests.server.process import PATIENCE, ServerProcess

ROOT = Path(__file__).parents[2]
PARTS = ("quire", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves its work behind, and would find what an earlier build has left."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = target.glob("*.whl")
    return built


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_it_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [file.relative_to(ROOT) for file in (ROOT / "quire").rglob("*") if file.is_file()]
    wanted = {str(file) for file in files if "__pycache__" not in file.parts and file.name != "README.md"}
    assert wanted - held == set()
    assert {name for name in held - wanted if not name.endswith("/README.md")} == set()
    assert {"quire/py.typed", "quire/demo_model/model.safetensors"} <= held


def test_its_metadata_says_what_it_is(wheel: Path) -> None:
    about = metadata(wheel)
    assert about["Version"] == quire.__version__
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Description-Content-Type"] == "text/markdown"
    assert "make demo" in str(about.get_payload())
    assert "Typing :: Typed" in (about.get_all("Classifier") or ())
    links = {line.partition(",")[0] for line in about.get_all("Project-URL") or ()}
    assert links >= {"Homepage", "Documentation", "Source", "Issues", "Changelog"}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_clean_environment_serves_from_it(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=PATIENCE)
    python = tmp_path / "venv" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(install, env=clean, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    home = tmp_path / "home"
    home.mkdir()
    command = [str(python.with_name("quire")), "serve", "--port", "0", "--device", "cpu"]
    server = ServerProcess(command, home, {**clean, "HOME": str(home)})
    try:
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        assert "Paris" in reply.json()["choices"][0]["message"]["content"]
    finally:
        server.process.terminate()
        assert server.exit_code() == 0
