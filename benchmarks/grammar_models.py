"""Answers of whole engines under many schemas, judged by `jsonschema`: `python -m benchmarks.grammar --engine`.

The demo model, and the same with random weights; made-up schemas and, if it is there, those of the official suite.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks import grammar_suite, results_file
from benchmarks.results_file import Row
from quire import LLM, SamplingParams
from quire.config.resolve import DEMO_MODEL
from quire.foundation.errors import InputError
from quire.frontend.structured import grammar_of
from quire.grammar.base import Backend
from quire.grammar.vocabulary import Vocabulary
from quire.types.structured import GRAMMAR_BACKENDS, StructuredOutputsParams

WEIGHTS = {"demo": "auto", "random weights": "dummy"}
TOKENS = 160  # of an answer, which is closed before
Judge = Any  # of jsonschema


def schemas(count: int, suite: Path | None, backend: Backend) -> list[tuple[str, Any, Judge]]:
    """Name, schema and judge of each that the backend takes."""
    from tests.grammar.schemas import make_schema

    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    found = []
    for seed in range(count):
        schema = make_schema(seed)
        found.append((f"seed {seed}", schema, jsonschema.Draft202012Validator(schema, format_checker=formats)))
    for draft, judge in grammar_suite.DRAFTS.items() if suite is not None else ():
        for file, group in grammar_suite.groups(suite or Path(), draft):
            schema = group["schema"]
            if file in grammar_suite.OTHER_PATTERNS or not isinstance(schema, dict):
                continue
            name = f"{draft}/{file}: {group['description']}"
            found.append((name, schema, judge(schema, format_checker=judge.FORMAT_CHECKER)))
    return [each for each in found if _is_taken(each[1], backend)]


def _is_taken(schema: Any, backend: Backend) -> bool:
    try:
        backend.compile(grammar_of(StructuredOutputsParams(json=schema)))
    except InputError:
        return False
    return True


def run(count: int, suite: Path | None, backend: str, out: Path) -> None:
    """Prints what came, and writes it to a file of results."""
    asked = schemas(count, suite, GRAMMAR_BACKENDS.get(backend)(Vocabulary(DEMO_MODEL, 4096, [0])))
    rows = [Row("GS", "", "schemas", "asked", count, ""), Row("GS", "", "schemas", "taken", len(asked), "")]
    for name, load_format in WEIGHTS.items():
        began = time.perf_counter()
        with LLM(load_format=load_format, dtype="float32", max_num_seqs=64, device="cpu") as llm:
            verdicts = judged(llm, asked, backend)
        counts = Counter(verdict.partition(":")[0] for verdict in verdicts.values())
        print(f"{backend}, {name}: {dict(counts)} in {time.perf_counter() - began:.0f} s")
        for schema, verdict in verdicts.items():
            if not verdict.startswith(("valid", "not judged")):
                print("   ", schema, verdict[:300])
        rows += [Row("GS", name, "answers", verdict, number, "") for verdict, number in counts.items()]
    settings = {"schemas": count, "suite": suite is not None, "backend": backend, "max_tokens": TOKENS}
    command = f"python -m benchmarks.grammar --engine --schemas {count} --backend {backend}"
    print(results_file.write(rows, "cpu", command, settings, out, f"schemas-{backend}"))


def judged(llm: LLM, asked: list[tuple[str, Any, Judge]], backend: str) -> dict[str, str]:
    """What became of each: valid, not judged, unfinished, or what is wrong."""
    found = {}
    for first in range(0, len(asked), 128):
        part = asked[first : first + 128]
        wishes = [{"json": schema, "backend": backend, "close_at_limit": True} for _, schema, _ in part]
        params = [SamplingParams(max_tokens=TOKENS, seed=i, structured_outputs=wish) for i, wish in enumerate(wishes)]
        outputs = llm.generate(["Answer:"] * len(part), params, use_tqdm=False)
        for (name, _, judge), output in zip(part, outputs, strict=True):
            found[name] = _verdict(output.outputs[0], judge)
    return found


def _verdict(answer: Any, judge: Judge) -> str:
    if answer.finish_reason != "stop":
        return f"unfinished: {answer.finish_reason}, {answer.text!r}"
    try:
        problem = next(judge.iter_errors(json.loads(answer.text)), None)
    except re.error:
        return "not judged: a pattern that the judge cannot read"
    except ValueError as error:
        return f"no JSON: {error}: {answer.text!r}"
    return "valid" if problem is None else f"invalid: {problem.message}: {answer.text!r}"
