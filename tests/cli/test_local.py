"""The commands that start an engine of their own, on a small random model."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.server.models_for_tests import make_model
from tests.server.process import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def run(command: str, model: Path, *options: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    arguments = [*command.split(), str(model), "--dtype", "float32", "--device", "cpu", *options]
    return subprocess.run(
        [sys.executable, "-m", "quire.cli.main", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def bench(kind: str, model: Path, file: Path, *options: str) -> dict[str, Any]:
    done = run(f"bench {kind}", model, "--output-json", str(file), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(file.read_text())
    assert numbers["options"]["model"] == str(model)
    return numbers


def test_chat_answers_and_goes_on_after_a_prompt_that_is_too_long(model: Path) -> None:
    done = run("chat", model, "--max-tokens", "5", "--temperature", "0", stdin=f"hi\n{'word ' * 500}\nhi\n/quit\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens/s]") == 2
    assert "context" in done.stderr
    assert "tokens/s" not in done.stdout
    assert "> " not in done.stdout  # nobody types, so nobody is asked
    assert "Commands" not in done.stdout


def test_chat_refuses_what_is_no_parameter_and_goes_on(model: Path) -> None:
    wrong = ["temperature=hot", "temperature=0 max_tokens=many", "max_tokens=-3", "max_tokens=5 nonsense=1"]
    lines = [line for one in wrong for line in (f"/params {one}", "hi")]
    lines += ["/params nonsense=", "hi", "/params max_tokens=", "hi", "/quit"]
    done = run("chat", model, "--temperature", "0", stdin="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    assert "internal" not in done.stderr
    assert done.stderr.count("tokens/s]") == 2  # of the last two; none of what is refused
    for words in ("temperature must be", "max_tokens must be an integer", "max_tokens must be >= 1", "nonsense is no"):
        assert done.stderr.count(words) == 1


class Terminal:
    """A command in a terminal of its own, where Ctrl-C is a key."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.environ |= {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
            os.execv(sys.executable, [sys.executable, "-m", "quire.cli.main", *arguments])
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def read_until(self, wanted: str, seconds: float = PATIENCE) -> str:
        """What came up to the end of `wanted`."""
        deadline = time.monotonic() + seconds
        while wanted not in self.seen:
            self.read_some(deadline - time.monotonic())
        before, _, self.seen = self.seen.partition(wanted)
        return before + wanted

    def read_some(self, seconds: float = PATIENCE) -> None:
        ready, _, _ = select.select([self.file], [], [], max(0.0, seconds))
        assert ready, self.seen
        piece = b""
        with contextlib.suppress(OSError):  # the other end is closed
            piece = os.read(self.file, 65536)
        assert piece, self.seen
        self.seen += piece.decode("utf-8", "replace")

    def exit_code(self) -> int:
        with contextlib.suppress(OSError):
            while os.read(self.file, 65536):
                pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.file)


def without_end(model: Path, folder: Path) -> Path:
    """The same model without an end token and for a long context: no answer of it ends by itself."""
    shutil.copytree(model, folder)
    for name, changes in {
        "config.json": {"eos_token_id": None, "max_position_embeddings": 20000},
        "generation_config.json": {"eos_token_id": None},
        "tokenizer_config.json": {"eos_token": None},
    }.items():
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_ctrl_c_ends_an_answer_and_not_the_conversation(model: Path, tmp_path: Path) -> None:
    """Five times, each at another point of an answer that would take minutes."""
    long = ["--max-model-len", "20000", "--max-tokens", "19000"]
    fixed = ["--dtype", "float32", "--device", "cpu", "--temperature", "0", "--num-gpu-blocks-override", "1400"]
    terminal = Terminal("chat", str(without_end(model, tmp_path / "endless")), *fixed, *long)
    try:
        terminal.read_until("> ")
        for number in range(5):
            terminal.type(f"hi {number}\n")
            terminal.read_until(f"hi {number}\r\n")
            for _ in range(3 * number):  # pieces of the answer; the first time there is none yet
                terminal.read_some()
            terminal.type("\x03")
            told = terminal.read_until("> ")
            assert "RuntimeError" not in told
            # The first time it may still have met the line that was typed.
            assert " …\r\n" in told or (number == 0 and "Ctrl-D leaves" in told), told
            assert "tokens/s]" in told or number == 0, told
        terminal.type("/help\n")
        assert "/clear forgets" in terminal.read_until("> ")
        terminal.type("/hlep me\n")
        assert "there is no command '/hlep me'" in terminal.read_until("> ")
        terminal.type("/quit\n")
        assert terminal.exit_code() == 0
    finally:
        terminal.close()


def test_complete_is_greedy_at_temperature_zero(model: Path) -> None:
    done = run("complete", model, "--quick", "Hello", "--max-tokens", "8", "--temperature", "0", "--no-stats")
    with LLM(str(model), device="cpu", dtype="float32", num_threads=1) as llm:
        (wanted,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert done.stdout.strip() == wanted.outputs[0].text.strip() != ""


def test_bench_throughput(model: Path, tmp_path: Path) -> None:
    shape = ["--num-prompts", "8", "--input-len", "16", "--output-len", "8"]
    numbers = bench("throughput", model, tmp_path / "n.json", *shape)
    assert numbers["num_requests"] == 8
    assert numbers["total_num_tokens"] == 8 * (16 + 8)
    assert numbers["tokens_per_second"] == pytest.approx(numbers["total_num_tokens"] / numbers["elapsed_time"])


@pytest.mark.long
def test_bench_latency(model: Path, tmp_path: Path) -> None:
    shape = [
        "--batch-size",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--num-iters",
        "3",
        "--num-iters-warmup",
        "1",
    ]
    numbers = bench("latency", model, tmp_path / "n.json", *shape)
    assert len(numbers["latencies"]) == 3
    assert min(numbers["latencies"]) <= numbers["avg_latency"] <= max(numbers["latencies"])


@pytest.mark.long
def test_bench_startup(model: Path, tmp_path: Path) -> None:
    numbers = bench("startup", model, tmp_path / "n.json", "--num-iters-warm", "1", "--num-iters-warmup", "0")
    (one,) = numbers["runs"]
    assert sum(one["phases"].values()) == pytest.approx(one["total"])
    assert numbers["mean_startup_s"] == pytest.approx(one["total"])


def test_a_prompt_longer_than_the_context_is_told_in_three_lines(model: Path) -> None:
    done = run("bench throughput", model, "--num-prompts", "1", "--input-len", "5000")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-3].startswith("quire: error: ")
    assert "Traceback" not in done.stderr
