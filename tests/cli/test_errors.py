"""What a user reads when something is wrong, word for word: errors.golden has the commands and what they say.

`python -m tests.cli.test_errors` writes it anew; look at the difference.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.foundation.error_codes import TITLES, entries, entry_of
from quire.foundation.errors import ConfigError, ContextLengthError, EngineDeadError, InputError, WeightsError
from tests.server.conftest import echo_server

FILE = Path(__file__).with_name("errors.golden")
MOST_LINES = 15
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
COMMANDS = """
quire serv
quire serve --prot 1
quire serve --port x
quire serve --port 70000
quire serve --port @taken
quire serve --host no-such-host.invalid --port 0
quire serve --config no.yaml
quire serve --config list.yaml
quire serve --config typo.yaml
quire serve --config value.yaml
quire serve --ssl-keyfile no.pem --ssl-certfile no.pem
quire serve --ssl-keyfile no.pem
quire serve --api-key-file empty.txt
quire serve --api-key-file no.txt
quire serve --api-key --port 0
quire serve --nnodes 2
quire serve --task embed
quire serve --model-path nothing
quire serve --mem-fraction-static 0.8
quire serve --model nothing 4096
quire serve --batch-dir list.yaml --port 0
quire serve ./no/such/folder --port 0
quire serve https://huggingface.co/some/model --port 0
quire serve no.gguf --port 0
quire serve list.yaml --port 0
quire serve nothing --port 0
quire serve adapter --port 0
quire serve pictures --port 0
quire serve strange --port 0
quire serve broken --port 0
quire serve wordy --port 0
quire serve lopsided --skip-tokenizer-init --device cpu --tensor-parallel-size 2 --port 0
quire serve coded --port 0
quire serve thin --port 0
quire serve --device cuda --port 0
quire serve --device warp --port 0
quire serve --device gpu --port 0
quire serve --dtype float8
quire serve --max-model-len 0 --port 0
quire serve --max-model-len 100000 --port 0
quire serve --gpu-memory-utilization 2 --port 0
quire serve --quantization int99 --port 0
quire serve --kv-cache-dtype int3
quire serve --tensor-parallel-size 3 --port 0 --device cpu
quire serve --attention-backend flash9 --port 0
quire serve --speculative-config {"method":"oracle","num_speculative_tokens":2} --port 0
quire serve --speculative-config {} --speculative-config.method ngram --port 0
quire serve --speculative-config {"method":"ngram","num_speculative_tokens":2} --pipeline-parallel-size 2 --device cpu
quire serve --tool-call-parser smoke --port 0
quire serve --chat-template no.jinja --port 0
quire serve --logits-processors nowhere:Class --port 0
quire serve --profiler-config {"profiler":"vtune"} --port 0
quire serve --pooler-config {"pooling":"best"} --runner pooling --port 0
quire serve --lora-modules one --port 0
quire serve --enable-lora --max-lora-rank 0 --port 0
quire chat --url http://127.0.0.1:@closed --quick hi
quire chat --url ftp://somewhere --quick hi
quire chat --temperature hot
quire bench serve --url http://127.0.0.1:@closed
quire bench serve --request-rate 0
quire bench serve --output-json no/such/folder.json
quire bench plot --results list.yaml --output no/such/folder.svg
quire profile --trace list.yaml
quire bench serv
quire bench nothing
quire run-batch -i no.jsonl -o out.jsonl
quire explain huub
"""


def lay_out(folder: Path) -> None:
    """Files with a mistake each."""
    (folder / "list.yaml").write_text("- port\n")
    (folder / "typo.yaml").write_text("prot: 1\n")
    (folder / "value.yaml").write_text("max_num_seqs: many\n")
    (folder / "empty.txt").write_text("# no key\n")
    (folder / "nothing").mkdir()
    for name, file in (("adapter", "adapter_config.json"), ("pictures", "model_index.json")):
        (folder / name).mkdir()
        (folder / name / file).write_text("{}")
    configs = {
        "strange": SMALL | {"architectures": ["LamaForCausalLM"]},
        "wordy": SMALL | {"hidden_size": "large"},
        "lopsided": SMALL | {"num_key_value_heads": 3},
        "coded": SMALL | {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "own.Own"}},
        "thin": SMALL,
    }
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], ')


def told(command: str) -> str:
    """Exit code and stderr of a command that runs in this process, without what changes from run to run."""
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = {"@taken": str(taken.getsockname()[1]), "@closed": str(closed.getsockname()[1])}
        closed.close()
        line = command
        for name, port in ports.items():
            line = line.replace(name, port)
        stderr = io.StringIO()
        words = line.split() if "{" in line else shlex.split(line)
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = main(words[1:])
            except SystemExit as exit_:
                code = int(str(exit_.code or 0))
        text = stderr.getvalue()
        for name, port in ports.items():
            text = text.replace(port, name)
    text = "\n".join(line for line in text.splitlines() if not re.match(r"\d\d:\d\d:\d\d", line))  # the log
    return f"exit {code}\n{text}\n"


def golden() -> dict[str, str]:
    blocks = FILE.read_text(encoding="utf-8").split("\n$ ")[1:]
    return dict(block.split("\n", 1) for block in blocks)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS.split("\n")[1:-1])
@pytest.mark.usefixtures("folder")
def test_what_it_says(command: str) -> None:
    text = told(command)
    assert text.rstrip() == golden()[command].rstrip()
    assert "Traceback" not in text


def test_all_are_short_and_have_a_code() -> None:
    texts = golden()
    assert len(texts) >= 40
    for command, text in texts.items():
        assert len(text.splitlines()) - 1 <= MOST_LINES, command
        assert not text.startswith("exit 0"), command
        codes = re.findall(r"\((?:([\w-]+): `quire explain|([\w-]+)\)$)", text, re.MULTILINE)
        assert command == "quire explain huub" or {a or b for a, b in codes} & entries().keys(), command


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("aiohttp", "bench", "quire bench serve --url http://127.0.0.1:1"),
        ("xgrammar", "xgrammar", 'quire serve --structured-outputs-config {"backend":"xgrammar"} --port 0'),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_package_that_is_not_there(package: str, extra: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith("quire.cli.bench.")]:
        monkeypatch.delitem(sys.modules, name)
    text = told(command)
    assert f"pip install 'quire[{extra}]'" in text
    assert "(missing-package: " in text
    assert len(text.splitlines()) - 1 <= MOST_LINES


def test_a_package_that_the_engines_process_lacks(tmp_path: Path) -> None:
    """What that says is all that is said: it is told by the process that the user has started."""
    (tmp_path / "ray.py").write_text("raise ImportError('there is none')\n")
    paths = [str(tmp_path), str(Path(sys.modules["quire"].__file__ or "").parents[1])]
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--device", "cpu", "--port", "0"]
    found = subprocess.run(
        [*command, "--distributed-executor-backend", "ray"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line for line in found.stderr.splitlines() if " INFO " not in line]
    assert found.returncode == 2
    assert lines[0] == "quire: error: Ray is not installed: pip install 'quire[ray]'"
    assert "(missing-package: " in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), "bad-value"),
        (ConfigError("x", "port"), "listen"),
        (ConfigError("x", "model", code="hub"), "hub"),
        (WeightsError("x", "model"), "weights"),
        (InputError("x"), "bad-field"),
        (InputError("x", "messages[1].content"), "bad-prompt"),
        (ContextLengthError.of(9, 1, 8), "context-length"),
        (EngineDeadError("x"), "engine-dead"),
        (ModuleNotFoundError("x"), "missing-package"),
        (OSError(errno.ENOSPC, "No space left on device"), "folder"),
        (OSError(errno.EBADF, "x"), "internal"),
        (ValueError("x"), "internal"),
    ],
)
def test_an_error_finds_its_entry(error: Exception, code: str) -> None:
    assert entry_of(error).code == code


def test_no_code_is_given_twice_and_each_that_is_raised_is_there() -> None:
    assert len(entries()) == sum(map(len, TITLES.values()))
    quire = Path(sys.modules["quire"].__file__ or "").parent
    raised = {
        code for file in quire.rglob("*.py") for code in re.findall(r'\bcode="([a-z-]+)"', file.read_text("utf-8"))
    }
    assert raised <= entries().keys()


def test_v_shows_where_and_all_of_a_long_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_arguments: list[str]) -> int:
        raise ConfigError("\n".join(f"tensor {i}" for i in range(40)))

    monkeypatch.setattr("quire.cli.serve.run", fail)
    assert main(["serve"]) == 2
    short = capsys.readouterr().err
    assert len(short.splitlines()) <= MOST_LINES
    assert "31 lines more" in short
    assert main(["serve", "-v"]) == main(["-v", "serve"]) == 2
    long = capsys.readouterr().err
    assert "tensor 39" in long
    assert "Traceback" in long


def test_what_nobody_foresaw_is_told_as_that(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.serve.run", lambda _arguments: {}["x"])
    assert main(["serve"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"internal error: KeyError: 'x' \(.*test_errors.py:\d+\)", said)
    assert "collect-env" in said


def test_a_full_disk_is_no_fault_of_ours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_arguments: list[str]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "answers.txt")

    monkeypatch.setattr("quire.cli.complete.run", fail)
    assert main(["complete"]) == 1
    said = capsys.readouterr().err
    assert "cannot be written: No space left on device: 'answers.txt'" in said
    assert "internal" not in said


def test_a_server_names_the_code_in_a_header() -> None:
    with echo_server(keys=("secret",)) as served:
        key = {"authorization": "Bearer secret"}
        assert served.client.get("/v1/models").headers["x-error-code"] == "unauthorized"
        assert served.client.get("/nowhere", headers=key).headers["x-error-code"] == "not-found"
        for field, code in (("temperature", "bad-sampling"), ("max_tokens", "bad-sampling")):
            body = {"prompt": "x", field: -1}
            assert served.client.post("/v1/completions", json=body, headers=key).headers["x-error-code"] == code


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"COLUMNS": "100", "XDG_CACHE_HOME": f"{name}/cache", "HF_HUB_OFFLINE": "1"}
        os.chdir(name)
        lay_out(Path(name))
        blocks = [f"\n$ {command}\n{told(command)}" for command in COMMANDS.split("\n")[1:-1]]
    FILE.write_text("".join(blocks), encoding="utf-8")
