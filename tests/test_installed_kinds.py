"""A package that adds one of each kind that the engine makes: all of them at work, in the processes they belong to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.foundation.packages import install
from tests.server.process import PATIENCE

ROOT = Path(__file__).parents[1]
NOTE = """
import os
def note(name):
    if "TRACE" in os.environ:  # the process that tries strangers' grammars has an environment of its own
        with open(os.environ["TRACE"], "a") as file:
            file.write(f"{name} {os.getpid()}\\n")
"""
BRAIN = """
from my_note import note
from quire.executor.multiproc import MultiprocExecutor
from quire.grammar.llguidance.backend import LLGuidance, LLGuidanceMatcher
from quire.parsers.reasoning.families import QWEN3

class Reasoning:
    def __getattr__(self, name):
        if name == "parser":
            note("reasoning")
        return getattr(QWEN3, name)

REASONING = Reasoning()

class Executor(MultiprocExecutor):
    def __init__(self, *args):
        note("executor")
        super().__init__(*args)

class Grammars(LLGuidance):
    def __init__(self, vocabulary):
        note("grammars")
        LLGuidanceMatcher.backend = "my_grammars"
        super().__init__(vocabulary)
"""
MUSCLE = """
from my_note import note
from quire import LogitsProcessor
from quire.quantization.fp8 import Fp8Channel
from quire.quantization.methods.fp8 import Fp8
from quire.worker.drafters import NgramDrafter

class Format(Fp8Channel):
    def tensors(self, *args):
        note("format")
        return super().tensors(*args)

class Method(Fp8):
    format_name = "my_format"

    def __init__(self):
        note("method")
        super().__init__()

class Drafter(NgramDrafter):
    def __init__(self, setup):
        note("drafter")
        super().__init__(setup)

class Processor(LogitsProcessor):
    def __init__(self, setup):
        note("processor")
        super().__init__(setup)

    def admit(self, params):
        return params.extra_args

    def apply(self, logits, rows):
        logits[:, rows[0].state["token"]] += 100
"""
POINTS = {
    "quire.executor": {"my_executor": "my_brain:Executor"},
    "quire.grammar_backend": {"my_grammars": "my_brain:Grammars"},
    "quire.reasoning_parser": {"my_reasoning": "my_brain:REASONING"},
    "quire.drafter": {"my_drafter": "my_muscle:Drafter"},
    "quire.quantization_method": {"my_method": "my_muscle:Method"},
    "quire.weight_format": {"my_format": "my_muscle:Format"},
    "quire.logits_processor": {"my_processor": "my_muscle:Processor"},
}
ASK = """
import json, sys
from quire import LLM, SamplingParams
options = json.loads(sys.argv[1])
asked = [
    SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=16, seed=3, structured_outputs={"choice": ["yes", "no"]}),
    *([SamplingParams(max_tokens=4, extra_args={"token": 77})] if "logits_processors" in options else []),
]
with LLM(device="cpu", num_threads=1, max_model_len=128, use_tqdm_on_load=False, **options) as llm:
    outputs = llm.generate(["a a a a a a a a a"] * len(asked), asked, use_tqdm=False)
    llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=2), use_tqdm=False)
    assert not [o.error for o in outputs if o.error], [o.error for o in outputs]
    accepted = llm.llm_engine.client.call("stats").get("num_draft_tokens", 0)
print(json.dumps([[list(o.outputs[0].token_ids) for o in outputs], outputs[1].outputs[0].text, accepted]))
"""


def run(folder: Path, **options: Any) -> tuple[list[list[int]], str, int, dict[str, set[int]]]:
    """Tokens, the text of the bound answer, drafts, and by class the processes that made one."""
    trace = folder / "trace"
    trace.write_text("")
    paths = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(options)], env={**os.environ, "PYTHONPATH": paths, "TRACE": str(trace)},
        cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = defaultdict(set)
    for line in trace.read_text().splitlines():
        name, pid = line.split()
        made[name].add(int(pid))
    tokens, text, drafted = json.loads(done.stdout)
    return tokens, text, drafted, dict(made)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    install(tmp_path, "my-kinds", POINTS, my_note=NOTE, my_brain=BRAIN, my_muscle=MUSCLE)
    return tmp_path


@pytest.mark.long
def test_each_kind_does_its_work_where_it_belongs(package: Path) -> None:
    drafts = {"num_speculative_tokens": 3, "policy": "always", "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    tokens, text, drafted, made = run(
        package,
        distributed_executor_backend="my_executor",
        structured_outputs_config={"backend": "my_grammars"},
        reasoning_parser="my_reasoning",
        speculative_config={"method": "my_drafter", **drafts},
        quantization="my_method",
        logits_processors=["my_processor"],
    )
    plain, plain_text, _, nobody = run(
        package, distributed_executor_backend="mp", speculative_config={"method": "ngram", **drafts}, quantization="fp8"
    )
    assert tokens[:2] == plain
    assert text == plain_text in ("yes", "no")
    assert set(tokens[2]) == {77}
    assert drafted > 0
    assert nobody == {}, "a start that asks for none imports none"
    assert made.keys() == {"executor", "grammars", "reasoning", "drafter", "method", "format", "processor"}
    (brain,) = made["executor"]
    (worker,) = made["drafter"]
    assert worker != brain
    assert made["method"] == made["format"] == made["processor"] == {worker}
    assert made["grammars"] == made["reasoning"] == {brain}


@pytest.mark.parametrize(
    ("options", "group"),
    [
        ({"distributed_executor_backend": "my_executor"}, "executor"),
        pytest.param({"reasoning_parser": "my_reasoning"}, "reasoning_parser", marks=pytest.mark.long),
        pytest.param(
            {"speculative_config": {"method": "my_drafter", "num_speculative_tokens": 2}},
            "drafter",
            marks=pytest.mark.long,
        ),
        ({"quantization": "my_method", "distributed_executor_backend": "mp"}, "quantization_method"),
        pytest.param({"logits_processors": ["my_processor"]}, "logits_processor", marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_of_the_wrong_kind_is_told_by_package_and_entry_point(tmp_path: Path, options: Any, group: str) -> None:
    """Also by a worker in a process of its own."""
    wrong = {f"quire.{group}": dict.fromkeys(POINTS[f"quire.{group}"], "json:JSONDecoder")}
    install(tmp_path, "my-kinds", wrong)
    with pytest.raises(AssertionError) as told:
        run(tmp_path, **options)
    last = str(told.value).replace("\\n", "\n")
    assert "ConfigError: " in last
    assert "json:JSONDecoder of the package my-kinds (entry point my_" in last
    assert f"of the group quire.{group}), is no" in last
