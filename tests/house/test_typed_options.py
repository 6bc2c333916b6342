"""A type checker knows every option of an engine: names and types that are wrong are errors before anything runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOOD = """
from quire import LLM, AsyncEngineArgs, EngineArgs
from quire.frontend.llm_engine import LLMEngine

LLM("model", max_model_len=4096, dtype="bfloat16", hf_overrides={"a": 1}, logits_processors=["a:B", int])
LLM(model="model", async_scheduling=None, gpu_memory_utilization=0.5)
LLM.from_engine_args(EngineArgs(model="model", enforce_eager=True))
LLMEngine.from_engine_args(AsyncEngineArgs(max_num_seqs=3))
reveal_type(EngineArgs().kv_cache_dtype)
"""
BAD = {
    'LLM("model", max_model_lne=4)': "max_model_lne",
    'LLM("model", max_model_len="4k")': "max_model_len",
    'LLM("model", dtype="int7")': "dtype",
    'LLM("model", enable_prefix_caching="no")': "enable_prefix_caching",
    'LLM("model", hf_overrides=["a"])': "hf_overrides",
    "EngineArgs(sed=1)": "sed",
    'EngineArgs(seed="one")': "seed",
    'LLMEngine.from_options("model", devise="cpu")': "devise",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each line of the sample. Only the doors are followed: the rest has its own check."""
    folder = tmp_path_factory.mktemp("sample")
    lines = [*GOOD.strip().splitlines(), *BAD]
    (folder / "sample.py").write_text("\n".join(lines) + "\n")
    doors = ["quire/__init__.py", "quire/llm.py", "quire/frontend/llm_engine.py"]
    doors += ["quire/config/typed_options.py", "quire/config/engine_args.py"]
    config = folder / "mypy.ini"
    config.write_text("[mypy]\nfollow_imports = skip\nignore_missing_imports = True\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(folder / "cache"),
         "--no-error-summary", *(str(ROOT / door) for door in doors), str(folder / "sample.py")],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
    )  # fmt: skip
    found: dict[str, list[str]] = {line: [] for line in lines}
    for line in done.stdout.splitlines():
        if "sample.py:" in line:
            number, _, message = line.split("sample.py:")[1].partition(":")
            found[lines[int(number) - 1]].append(message)
    assert "reveal_type(EngineArgs().kv_cache_dtype)" in found, done.stdout + done.stderr
    return found


def test_right_options_pass(said: dict[str, list[str]]) -> None:
    (revealed,) = said.pop("reveal_type(EngineArgs().kv_cache_dtype)")
    assert 'Literal["fp8"]' in revealed.replace("'", '"'), revealed
    assert {line: errors for line, errors in said.items() if errors and line not in BAD} == {}


@pytest.mark.parametrize("line", BAD)
def test_wrong_options_are_errors(said: dict[str, list[str]], line: str) -> None:
    errors = [message for message in said[line] if "error" in message]
    assert errors, "mypy has nothing against it"
    assert BAD[line] in errors[0]
