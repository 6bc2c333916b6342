"""examples/plugin, installed for real into a folder: its family, tool format and stat logger work from there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.models_for_tests import make_model
from tests.server.process import PATIENCE, server_process, wait_until

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "examples" / "plugin"
PROMPTS = [[5, 9, 17, 200, 33, 8], [3] * 40, [250, 1, 77]]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Lima", "Oslo"]}, "days": {"enum": [1, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in it, made by pip from a copy, for building leaves files behind."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PLUGIN, folder / "source")
    target = folder / "target"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", target, source], check=True, timeout=PATIENCE)
    return target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Arcee's layers, as transformers writes it, under the name that the plugin goes by."""
    import torch
    from transformers import ArceeConfig, ArceeForCausalLM

    folder = make_model(tmp_path_factory.mktemp("model"))
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = ArceeConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.3, bos_token_id=None,
        eos_token_id=2, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(5)
    ArceeForCausalLM(config).float().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "architectures": ["SquaredReluForCausalLM"]}))
    return folder


def environment(installed: Path, stats: Path) -> dict[str, str]:
    paths = [str(installed), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "STATS_FILE": str(stats)}


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


GENERATE = """
import json, sys
from quire import LLM, SamplingParams

model, device, executor, prompts = *sys.argv[1:4], json.loads(sys.argv[4])
options = {"device": device, "dtype": "float32", "num_threads": 1, "max_model_len": 128, "stat_loggers": ["json_lines"]}
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)
with LLM(model, distributed_executor_backend=executor, use_tqdm_on_load=False, **options) as llm:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
told = []
for output in outputs:
    (answer,) = output.outputs
    lines = [next(iter(line.values())).logprob for line in [*output.prompt_logprobs[1:], *answer.logprobs]]
    told.append([list(answer.token_ids), lines])
print(json.dumps(told))
"""


@pytest.mark.parametrize(
    ("device", "executor"),
    [
        ("cpu", "uni"),
        pytest.param("cpu", "mp", marks=pytest.mark.long),
        pytest.param("cuda", "mp", marks=pytest.mark.gpu),
    ],
)
def test_the_family_computes_what_it_says(
    installed: Path, model: Path, tmp_path: Path, device: str, executor: str
) -> None:
    """Log-probabilities of every position as transformers has them, with the worker here and in its own process."""
    import torch
    from transformers import ArceeForCausalLM

    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(model), device, executor, json.dumps(PROMPTS)],
        env={**os.environ, **environment(installed, tmp_path / "stats")}, cwd=tmp_path, capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reference = ArceeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prompt, (tokens, logprobs) in zip(PROMPTS, json.loads(done.stdout), strict=True):
        ids = torch.tensor([*prompt, *tokens])
        with torch.inference_mode():
            every = reference(ids[None]).logits[0].log_softmax(-1)
        wanted = every[:-1].gather(1, ids[1:, None])[:, 0]
        assert (torch.tensor(logprobs) - wanted).abs().max() <= (1e-4 if device == "cpu" else 1e-2)
        assert device != "cpu" or every[len(prompt) - 1 : -1].argmax(1).tolist() == tokens
        assert len(set(tokens)) > 2, "a model that repeats itself shows little"
    last = records(tmp_path / "stats")[-1]
    assert last["prompt_tokens"] == sum(map(len, PROMPTS))
    assert last["generation_tokens"] == 12 * len(PROMPTS)
    assert last["model"] == str(model)


@pytest.fixture(scope="module")
def server(installed: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Its URL and the file of its stat logger; in the end it is asked to stop and has told everything by then."""
    stats = tmp_path_factory.mktemp("stats") / "stats"
    options = ["--port", "0", "--dtype", "float32", "--device", "cpu", "--served-model-name", "tiny"]
    options += ["--tool-call-parser", "brackets", "--stat-loggers", "json_lines"]
    with server_process("quire.cli.main", "serve", str(model), *options, **environment(installed, stats)) as process:
        yield process.url, stats
        process.signal(signal.SIGTERM)
        assert process.exit_code() == 0
    told = records(stats)
    assert told[-1]["running"] == told[-1]["waiting"] == 0
    assert told[-1]["generation_tokens"] == max(line["generation_tokens"] for line in told) > 0
    assert {line["model"] for line in told} == {"tiny"}


def test_the_server_binds_and_reads_calls_in_the_format(server: tuple[str, Path]) -> None:
    url, _ = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "Rain?"}], "tools": [TOOL],
        "tool_choice": "required", "max_tokens": 120, "seed": 4,
    }  # fmt: skip
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    calls = answer.message.tool_calls or []
    assert calls
    for call in calls:
        assert call.type == "function"
        assert call.function.name == "weather"
        given = json.loads(call.function.arguments)
        assert given["city"] in ("Lima", "Oslo")
        assert given["days"] in (1, 3)
    streamed = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            if delta.index == 0 and delta.function is not None:
                streamed += delta.function.arguments or ""
    assert json.loads(streamed) == json.loads(calls[0].function.arguments)


def test_the_server_counts_for_the_logger(server: tuple[str, Path]) -> None:
    url, stats = server
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
    assert records(stats)[0]["model"] == "tiny"


@pytest.mark.long
def test_a_server_of_several_front_ends_has_one_logger(installed: Path, model: Path, tmp_path: Path) -> None:
    """In the process that has started the engine, whoever asks."""
    options = ["--port", "0", "--dtype", "float32", "--device", "cpu", "--served-model-name", "tiny"]
    options += ["--api-server-count", "2", "--stat-loggers", "json_lines"]
    stats = tmp_path / "stats"
    with server_process("quire.cli.main", "serve", str(model), *options, **environment(installed, stats)) as process:
        before = 0
        for _ in range(4):
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
            assert httpx.post(f"{process.url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
            before = before or records(stats)[0]["generation_tokens"]
        process.signal(signal.SIGTERM)
        assert process.exit_code() == 0
    counts = [line["generation_tokens"] for line in records(stats)]
    assert counts == sorted(counts)
    assert counts[-1] >= before + 3 * 8


def test_the_text_of_a_call_is_what_the_format_says(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model that was trained on it would write one, with text around it; in this process."""
    monkeypatch.syspath_prepend(installed)
    from quire_example.tool_format import BRACKETS  # type: ignore[import-not-found]

    from quire.types.reply import CallArguments, CallEnd, CallStart, Content

    parser = BRACKETS.parser([], parallel=True)
    text = 'Let me see. [[call]]{"name": "weather", "arguments": {"city": "Lima"}}[[/call]]'
    pieces = [piece for char in text for piece in parser.feed(char)] + parser.finish()
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == "Let me see."
    assert [piece.name for piece in pieces if isinstance(piece, CallStart)] == ["weather"]
    assert json.loads("".join(piece.text for piece in pieces if isinstance(piece, CallArguments))) == {"city": "Lima"}
    assert sum(isinstance(piece, CallEnd) for piece in pieces) == 1


def test_its_names_are_known_and_nobody_else_is_harmed(installed: Path) -> None:
    """A start that asks for none of it imports none of it; an unknown name is told what there is."""
    code = (
        "import sys; from quire.config.engine import EngineConfig\n"
        "from quire.parsers.base import TOOL_FORMATS\n"
        "TOOL_FORMATS.get('hermes')\n"
        "try: EngineConfig.from_flat(stat_loggers=['jason_lines'])\n"
        "except ValueError as error: print(error)\n"
        "print('brackets' in TOOL_FORMATS, 'quire_example' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment(installed, Path("stats"))},
        capture_output=True, text=True, check=True, timeout=PATIENCE,
    )  # fmt: skip
    assert "did you mean 'json_lines'? (known: log, json_lines, or a path" in done.stdout
    assert done.stdout.splitlines()[-1] == "True False"
    assert done.stderr == ""
    listed = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "collect-env"], env={**os.environ, **environment(installed, Path())},
        capture_output=True, text=True, check=True, timeout=PATIENCE,
    )  # fmt: skip
    about = "of the package quire-example (entry point json_lines of the group quire.stat_logger)"
    assert f"quire_example.stat_logger:JsonLines {about}" in listed.stdout


@pytest.mark.long
def test_one_that_cannot_be_imported_is_told_at_the_door(installed: Path, tmp_path: Path, model: Path) -> None:
    """Parts of the package are broken: who asks for them gets one line that names package and entry point."""
    broken = shutil.copytree(installed, tmp_path / "broken")
    (broken / "quire_example" / "tool_format.py").write_text("import not_installed_anywhere\n")
    (broken / "quire_example" / "family.py").unlink()
    for arguments, words in (
        ([str(model)], "SquaredReluForCausalLM', quire_example.family of the package quire-example (entry point"),
        (["--tool-call-parser", "brackets"], "cannot be imported: ModuleNotFoundError: No module named 'not_installed"),
    ):
        options = ["serve", *arguments, "--port", "0", "--device", "cpu", "--dtype", "float32"]
        with server_process("quire.cli.main", *options, **environment(broken, tmp_path / "stats")) as process:
            assert process.exit_code() == 2
            assert wait_until(lambda words=words, process=process: words in "".join(process.err)), process.err
            assert "Traceback" not in "".join(process.err)
