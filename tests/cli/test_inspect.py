"""`quire inspect`: what it says of models that run, that do not, and that are broken; of folders and of the hub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.cli import inspect_model
from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.config.resolve import DEMO_MODEL
from tests.models import checkpoints as hybrids
from tests.models.cases import CASES
from tests.server.process import PATIENCE

CONFIG = json.loads((DEMO_MODEL / "config.json").read_text())


def report(model: Path | str, memory: str | None = None, **options: Any) -> inspect_model.Report:
    return inspect_model.inspect(EngineConfig.from_flat(model=str(model), device="cpu", **options), memory)


def with_config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process has a test of its own."""
    from quire.worker.inspection import inspect

    monkeypatch.setattr(inspect_model, "_ask", inspect)


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "7.35 M" in text
    assert text.splitlines()[-1].startswith("verdict        runs on this machine's cpu: 64 at once of 2048 tokens")


def test_every_key_that_is_refused_is_named(tmp_path: Path) -> None:
    found = report(with_config(tmp_path, kv_lora_rank=512, alibi=True, hidden_act="gelu"))
    assert found.exit_code == 2
    named = [problem.partition("=")[0].removeprefix("config.json: ") for problem in found.problems]
    assert sorted(named) == ["alibi", "hidden_act", "kv_lora_rank"]
    assert found.findings is not None
    assert found.findings.parameters == 7345408


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["NobodyForCausalLM"]}, "'NobodyForCausalLM' is not supported"),
        ({"num_attention_heads": 0}, "num_attention_heads must be >= 1"),
        ({"num_hidden_layers": "x"}, "num_hidden_layers must be an integer"),
    ],
)
def test_models_that_cannot_run(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    found = report(with_config(tmp_path, **changes))
    assert found.exit_code == 2
    assert words in found.verdict
    assert dict(inspect_model.lines(found))["verdict"] == found.verdict
    assert json.loads(json.dumps(inspect_model.as_json(found)))["runs"] is False


def test_a_state_is_told_by_the_request(tmp_path: Path) -> None:
    """As the engine keeps it: pages of the pool, whatever the length."""
    made, config = CASES["bamba"]
    found = report(hybrids.save(hybrids.make(made, **config), tmp_path))
    assert found.findings is not None
    (state,) = (group for group in found.findings.groups if group.kind == "state")
    lines = [text for name, text in inspect_model.of_model(found) if name == "KV cache"]
    size = state.pages * found.findings.page_bytes / 1024
    assert f"{size:.2f} KiB a request, and a copy in the prefix cache: state, 2 layers" in lines
    told = {group["kind"]: group for group in inspect_model.as_json(found)["groups"]}
    assert told["state"]["bytes_per_request"] == size * 1024
    assert told["state"]["bytes_per_token"] == 0 < told["full"]["bytes_per_token"]


def test_what_does_not_fit(tmp_path: Path) -> None:
    found = report(with_config(tmp_path, max_position_embeddings=10**6), "40MiB", max_model_len=10**6)
    assert found.exit_code == 3
    assert found.verdict.startswith("does not fit on a CPU of 40.00 MiB: the KV cache may take")


def test_broken_checkpoints(tmp_path: Path) -> None:
    with_config(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-2.safetensors").write_bytes(b"12345678{")
    found = report(tmp_path)
    assert "model-1.safetensors is not there, which the index points to" in found.verdict
    assert "model-2.safetensors claims a header of" in found.verdict
    assert found.exit_code == 2
    whole = (DEMO_MODEL / "model.safetensors").read_bytes()
    (tmp_path / "model-1.safetensors").write_bytes(whole)
    (tmp_path / "model-2.safetensors").write_bytes(whole[:-1])
    assert f"model-2.safetensors ends at byte {len(whole) - 1}, and its header places" in report(tmp_path).verdict
    (tmp_path / "model-2.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    found = report(tmp_path)
    assert "model-2.safetensors is a Git LFS pointer" in found.verdict
    assert "model-1" not in found.verdict


class Hub(BaseHTTPRequestHandler):
    """Enough of the hub's HTTP for one repository of the demo model's files; what is asked for is written down."""

    fetched: dict[str, int]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        file = DEMO_MODEL / name
        if path.startswith("/api/models/some/model"):
            siblings = [{"rfilename": file.name} for file in DEMO_MODEL.iterdir()]
            tree = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "1" * 40}
                for f in DEMO_MODEL.iterdir()
            ]
            body = json.dumps(tree if "/tree/" in path else {"id": "some/model", "sha": "0" * 40, "siblings": siblings})
            self._answer(body.encode())
        elif path.startswith("/some/model/resolve/") and file.is_file():
            data = file.read_bytes()
            if "Range" in self.headers:
                begin, end = self.headers["Range"].removeprefix("bytes=").split("-")
                self._answer(data[int(begin) : int(end) + 1], 206)
            else:
                self._answer(data)
        else:
            self._answer(b"", 404)

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{self.path.rpartition("/")[2]}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if self.command == "GET":
            name = self.path.partition("?")[0].rpartition("/")[2]
            self.fetched[name] = self.fetched.get(name, 0) + len(body)
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a process needs to take it for the hub."""
    Hub.fetched = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    server.shutdown()
    thread.join()


def test_a_model_of_the_hub_is_judged_by_a_few_kilobytes(hub: dict[str, str]) -> None:
    """By the command itself, which imports no torch."""
    code = (
        "import sys; from quire.cli.main import main\n"
        "code = main(['inspect', 'some/model', '--json', '--memory', '80GiB'])\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "0", **hub},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    said = json.loads(done.stdout)
    assert said["runs"] is True
    assert (said["architecture"], said["family"]) == ("Qwen3ForCausalLM", "quire/models/qwen3.py")
    assert said["weight_bytes"] == said["checkpoint"]["bytes"] == 2 * said["parameters"]
    assert said["checkpoint"]["tensors"] == 90
    assert said["groups"][0]["bytes_per_token"] == 2 * 8 * 2 * 64 * 2
    assert said["tensor_parallel_sizes"] == [1, 2, 4]
    assert said["device"]["total"] == 80 * 2**30
    assert 0 < Hub.fetched["model.safetensors"] < 200_000
    assert "tokenizer.json" not in Hub.fetched


def test_a_gguf_file_is_told_by_its_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    from tests.gguf.test_files import write_demo

    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    kinds = gguf.GGMLQuantizationType
    write_demo(tmp_path / "demo.gguf", lambda name: kinds.Q8_0 if "attn_v" in name else kinds.Q4_0)
    found = dict(inspect_model.lines(report(tmp_path / "demo.gguf")))
    assert found["format"] == "gguf: matrices in Q4_0 (48), Q8_0 (8)"
    assert found["checkpoint"].startswith("4.08 MiB, 90 tensors in 1 files: 0.000 G F32, 0.007 G Q4_0")
    assert found["verdict"].startswith("runs on")


def test_ctrl_c_is_told_by_nobody() -> None:
    """Not by the process that builds the model either."""
    command = [sys.executable, "-m", "quire.cli.main", "inspect", "--device", "cpu"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("format"):
            assert process.poll() is None
        while True:
            others = psutil.Process(process.pid).children()
            if others and "quire.worker.inspection" in others[0].cmdline():
                break
            time.sleep(0.01)
        assert os.getpgid(others[0].pid) != process.pid  # a terminal does not interrupt it
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 130
    assert said == ""


def test_quick_does_not_build_the_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(inspect_model, "_ask", lambda _: pytest.fail("it was built"))
    assert inspect_model.run(["--quick", "--device", "cpu"]) == inspect_model.RUNS
    told = capsys.readouterr().out
    assert "format         plain\n" in told
    assert "14.01 MiB, 90 tensors" in told
    assert inspect_model.run(["--quick", "--device", "cpu", "--json"]) == inspect_model.RUNS
    assert json.loads(capsys.readouterr().out)["checkpoint"]["bytes_by_type"] == {"BF16": 14_690_816}
