"""Whatever can be made up from the server's own document gets an answer that the document promises, and never a 5xx."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from quire.config.engine import EngineConfig
from quire.config.serve import ServeConfig
from quire.server.app import build_app
from quire.server.service import Service
from tests.effort import some
from tests.server.process import server_process

pytest.importorskip("schemathesis")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES = os.environ.get("QUIRE_OPENAPI_EXAMPLES", str(some(9, 4)))  # of each operation


def test_answers_conform(tmp_path: Path) -> None:
    options = [
        "--port",
        "0",
        "--device",
        "cpu",
        "--enable-docs",
        "--max-model-len",
        "512",
        "--batch-dir",
        str(tmp_path),
    ]
    with server_process("quire.cli.main", "serve", *options) as server:
        url = f"{server.url}/openapi.json"
        document = httpx.get(url).json()
        assert len(document["paths"]) > 30
        run = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "run", url, "--checks", CHECKS, "--max-examples", EXAMPLES,
             "--phases", "fuzzing", "--seed", "1", "--request-timeout", "30", "--no-color"],
            capture_output=True, text=True, cwd=tmp_path, timeout=300,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
        assert "Tested: " in run.stdout
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_references_lead_somewhere(tmp_path: Path) -> None:
    document = build_app(Service(EngineConfig(), ServeConfig(batch_dir=str(tmp_path)))).openapi()

    def references(node: object) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*map(references, node.values()))
        return set().union(*map(references, node)) if isinstance(node, list) else set()

    found = references(document)
    assert found
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert found <= known
    assert all(
        "422" not in operation["responses"] for path in document["paths"].values() for operation in path.values()
    )
