"""The `quire` command itself, as a process: light, clear, with exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.cli.main import COMMANDS
from tests.server.conftest import Served, echo_server
from tests.server.echo_llm import EchoLLM
from tests.server.process import PATIENCE

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "fastapi", "numpy")


def run(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire.cli.main", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120", **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)


def test_no_command_is_an_error() -> None:
    assert run().returncode == 2


def test_a_misspelled_command_is_corrected() -> None:
    done = run("serv")
    assert done.returncode == 2
    assert "did you mean 'serve'" in done.stderr


def test_version() -> None:
    assert run("--version").stdout.strip() == quire.__version__


@pytest.mark.parametrize("line", ["--help", "serv", "serve --help", "serve --prot 1", "chat --help"])
def test_help_and_mistakes_import_nothing_heavy(line: str) -> None:
    code = (
        "import sys\nfrom quire.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *line.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout.rstrip().endswith("HEAVY []"), done.stdout[-300:] + done.stderr


def test_a_config_mistake_is_three_lines(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("prot: 1\n")
    done = run("serve", "--config", str(file))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 3
    assert "did you mean 'port'" in done.stderr


def test_a_missing_model_is_told_without_a_traceback() -> None:
    done = run("serve", "./no/such/folder", "--port", "0")
    assert done.returncode == 2, done.stderr
    assert "no/such/folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m quire.cli.main serve --help | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stderr == ""


def test_doctor_says_what_runs_here() -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stdout
    assert "Python" in done.stdout
    assert "Ready for models on" in done.stdout


def test_doctor_works_without_torch(tmp_path: Path) -> None:
    """A Python with nothing installed: the package from its folder, no site-packages."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "quire.cli.main", "doctor"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "pip install torch" in done.stdout


def test_collect_env_hides_secrets() -> None:
    done = run("collect-env", HF_TOKEN="hf_verysecret", QUIRE_DEBUG="1")
    assert done.returncode == 0
    assert quire.__version__ in done.stdout
    assert "QUIRE_DEBUG" in done.stdout
    assert "verysecret" not in done.stdout


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with echo_server(EchoLLM(delay=0.001, served_model_name=["echo"]), keys=("secret",)) as server:
        yield server


def test_complete_from_a_server(served: Served) -> None:
    done = run("complete", "--url", served.url, "--api-key", "secret", "--quick", "abc", "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "abcab"
    assert done.stdout.splitlines() == ["abcab"]
    assert "5 tokens" in done.stderr


def test_complete_reads_lines(served: Served) -> None:
    done = run("complete", "--url", f"{served.url}/v1", "--max-tokens", "2", stdin="ab\ncd\n", QUIRE_API_KEY="secret")
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")] == ["ab", "cd"]


def test_chat_keeps_the_conversation(served: Served) -> None:
    before = len(served.llm.seen)
    stdin = "one\ntwo\n/help\n/clear\n/nothing of the kind\nthree\n/quit\n"
    done = run("chat", "--url", served.url, "--api-key", "secret", "--max-tokens", "3", stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["use", "use", "use"]
    assert "there is no command '/nothing of the kind'" in done.stderr
    assert len(served.llm.seen) == before + 3  # no command goes to the model
    prompts = [seen["prompt"].text for seen in served.llm.seen[-3:]]
    assert prompts[0] == "user: one\nassistant: "
    assert prompts[1] == "user: one\nassistant: use\nuser: two\nassistant: "
    assert prompts[2] == "user: three\nassistant: "


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--url", "ftp://x"], "url must look like"),
        (["--url", "SERVER"], "401"),
    ],
)
def test_chat_says_what_is_wrong_with_the_server(served: Served, arguments: list[str], says: str) -> None:
    done = run("chat", *[a.replace("SERVER", served.url) for a in arguments], "--quick", "x")
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 3


def test_a_server_is_asked_for_the_model_that_is_named(served: Served) -> None:
    done = run("chat", "another/model", "--url", served.url, "--api-key", "secret", "--quick", "x")
    assert done.returncode == 2
    assert "`another/model` does not exist" in done.stderr


def test_a_server_decides_how_long_an_answer_of_a_chat_may_be(served: Served) -> None:
    """Where fewer than 1,024 tokens are left a conversation goes on all the same."""
    for command in ("chat", "complete"):
        assert run(command, "--url", served.url, "--api-key", "secret", "--quick", "x").returncode == 0
    chat, complete = (seen["params"].max_tokens for seen in served.llm.seen[-2:])
    assert complete == 1024
    assert chat != 1024


def test_bench_serve_measures_a_server(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    shape = ["--num-prompts", "20", "--input-len", "8", "--output-len", "6", "--request-rate", "200"]
    limits = ["--max-concurrency", "4", "--goodput-ttft", "60000"]
    where = ["--url", served.url, "--api-key", "secret", "--output-json", str(file), "--save-detailed"]
    done = run("bench", "serve", *shape, *limits, *where)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(file.read_text())
    assert (numbers["completed"], numbers["failed"]) == (20, 0)
    assert numbers["total_input_tokens"] == 160
    assert numbers["total_output_tokens"] == 120
    assert numbers["mean_ttft_ms"] > 0
    assert numbers["p99_itl_ms"] >= numbers["p50_itl_ms"] > 0
    assert numbers["request_goodput"] == pytest.approx(numbers["request_throughput"])
    assert len(numbers["requests"]) == 20
    assert numbers["command"].startswith("quire bench serve")
    assert "secret" not in file.read_text()


def test_bench_serve_says_why_it_cannot(served: Served) -> None:
    done = run("bench", "serve", "--base-url", served.url, "--num-prompts", "1")
    assert done.returncode == 2
    assert "401" in done.stderr
