"""Claude Code and Codex themselves: real sessions, with an engine that says what a good model would.

They are installed by `make test-gateways` where npm is, and skipped otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.agents.conftest import MODEL
from tests.server.agents.dictated_llm import DictatedLLM, say
from tests.server.agents.scripts import call
from tests.server.conftest import Served, echo_server
from tests.server.process import ROOT

AGENTS = ROOT / ".venv-gateways" / "node_modules" / ".bin"
CLAUDE = Path(os.environ.get("CLAUDE_CODE") or AGENTS / "claude")
CODEX = Path(os.environ.get("CODEX") or AGENTS / "codex")
# The shell joins it: in the prompt nothing is to be said yet, in the tool's result it is.
LATER = "echo S''AY:It is $((40+2))."


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    llm = DictatedLLM(context=200_000, served_model_name=[MODEL])
    llm.step = 7
    (tmp_path / "repo").mkdir()
    (tmp_path / "home").mkdir()
    with echo_server(llm) as served:
        yield served


def run(program: Path, arguments: list[str], folder: Path, **environment: str) -> str:
    """What it prints. Nothing of this machine's settings reaches it."""
    if not program.exists():
        pytest.skip(f"{program.name} is not installed: make test-gateways")
    done = subprocess.run(
        [str(program), *arguments],
        cwd=folder / "repo",
        env={"PATH": os.environ["PATH"], "HOME": str(folder / "home"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def claude(served: Served, folder: Path, *arguments: str) -> str:
    environment = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return run(CLAUDE, [*arguments, "--output-format", "json"], folder, **environment)


def codex(served: Served, folder: Path, *arguments: str) -> str:
    settings = folder / "home" / ".codex"
    settings.mkdir(exist_ok=True)
    (settings / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "quire"\nmodel_context_window = 190000\n'
        f'[model_providers.quire]\nname = "Quire"\nbase_url = "{served.url}/v1"\nwire_api = "responses"\n'
    )
    return run(CODEX, ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", *arguments], folder)


def test_claude_code_thinks_calls_two_tools_and_answers(served: Served, tmp_path: Path) -> None:
    written = str(tmp_path / "repo" / "a.py")
    said = f"<think>Both at once.</think>I write.\n{call('Write', file_path=written, content='x = 1')}\n"
    said += call("Bash", command=LATER, description="say")
    reply = json.loads(claude(served, tmp_path, "-p", say(said), "--allowedTools", "Write,Bash"))
    assert (reply["is_error"], reply["result"], reply["num_turns"]) == (False, "It is 42.", 3)
    assert Path(written).read_text() == "x = 1"
    prompt = served.llm.prompts[-1]  # type: ignore[attr-defined]
    assert "<think>Both at once.</think>" in prompt
    assert "billing" not in prompt
    again = json.loads(claude(served, tmp_path, "--continue", "-p", say("Yes.")))
    assert again["result"] == "Yes."
    assert served.llm.prompts[-1].startswith(prompt[:1000])  # type: ignore[attr-defined]


def test_claude_code_with_a_schema(served: Served, tmp_path: Path) -> None:
    schema = json.dumps({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
    said = say(call("StructuredOutput", city="Paris"))
    assert json.loads(claude(served, tmp_path, "-p", said, "--json-schema", schema))["structured_output"] == {
        "city": "Paris"
    }


def test_claude_code_is_told_that_a_prompt_is_too_long(served: Served, tmp_path: Path) -> None:
    llm = served.llm
    assert isinstance(llm, DictatedLLM)
    llm.context = 1000
    with pytest.raises(AssertionError, match=r"[Pp]rompt is too long"):
        claude(served, tmp_path, "-p", "Hello")


def test_codex_thinks_calls_and_answers(served: Served, tmp_path: Path) -> None:
    said = f"<think>Look.</think>I look.\n{call('exec_command', cmd=LATER)}"
    printed = codex(served, tmp_path, say(said))
    assert printed.strip().endswith("It is 42.")
    assert "<think>Look.</think>" in served.llm.prompts[-1]  # type: ignore[attr-defined]


def test_codex_compacts_a_conversation_that_fills_its_context(served: Served, tmp_path: Path) -> None:
    """The first result is a long one: a summary is asked for, and after it the call is made again."""
    once = "if [ -e seen ]; then echo S''AY:It is 42.; else touch seen; seq 1 6000; fi"
    printed = codex(
        served,
        tmp_path,
        *("-c", f"model_auto_compact_token_limit={num_tokens(served, tmp_path) + 8000}"),
        say(call("exec_command", cmd=once)),
    )
    assert printed.strip().endswith("It is 42.")
    asked = [prompt.startswith("[tools]") for prompt in served.llm.prompts[1:]]  # type: ignore[attr-defined]
    assert asked.count(False) == 1, "the summary is asked for without tools"
    assert asked[0]
    assert asked[-1]


def num_tokens(served: Served, folder: Path) -> int:
    """Of a session's first prompt."""
    codex(served, folder, say("Hello"))
    return len(served.llm.prompts[-1])  # type: ignore[attr-defined]


def test_codex_is_told_that_a_prompt_is_too_long(served: Served, tmp_path: Path) -> None:
    llm = served.llm
    assert isinstance(llm, DictatedLLM)
    llm.context = 1000
    with pytest.raises(AssertionError, match="ran out of room in the model's context window"):
        codex(served, tmp_path, "Hello")
