"""`quire profile` on the demo model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from quire.cli.main import main


def test_each_layer_stands_beside_its_floor(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch-size", "2", "--input-len", "24", "--output-len", "4"]
    where = ["--device", "cpu", "--trace", str(tmp_path), "--output-json", str(tmp_path / "p.json")]
    assert main(["profile", *sizes, *where]) == 0
    shown = capfd.readouterr().out
    assert "prompts, steps of 48 tokens (1 of them)" in shown
    assert "decode, steps of 2 tokens (3 of them)" in shown
    found = json.loads((tmp_path / "p.json").read_text())
    layers = {(layer["name"], layer["tokens"]): layer for layer in found["layers"]}
    down = layers["layers.*.mlp.down_proj", 2]
    assert down["calls"] == 8 * 3
    assert down["floor"] > 0
    assert down["seconds"] > 0
    assert layers["layers.*.self_attn", 2]["floor"] > 0
    products = next(op for op in found["ops"] if op["op"] in ("aten::mm", "aten::addmm"))
    assert products["floor"] > 0
    trace = json.loads(gzip.decompress((tmp_path / "quire.pt.trace.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "layers.0.mlp.down_proj" in names


def test_sizes_and_ranks_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--batch-size", "0"]) == 2
    assert main(["profile", "--tensor-parallel-size", "2"]) == 2
    assert "looks into one process" in capsys.readouterr().err
