"""The official JSON-Schema-Test-Suite under grammars: `python -m benchmarks.grammar --suite FOLDER`.

FOLDER is the suite's root or its tests/. For every schema of a draft: is it refused, and for which keyword; else, which
instances does the grammar take in their compact form? One marked invalid that it takes is an error. One marked valid
that it does not take is none: a grammar writes numbers, the order of keys and what a schema leaves open in fewer ways.
And each grammar's own answers, drawn at random and closed in time, must be valid by the suite's draft.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from quire.foundation.errors import InputError
from quire.grammar.base import Backend
from quire.grammar.json_schema.normalize import plain
from quire.types.structured import GrammarSpec

DRAFTS = {"draft2020-12": jsonschema.Draft202012Validator, "draft7": jsonschema.Draft7Validator}
FOLDERS = ("", "optional", "optional/format")
ANNOTATIONS = ("optional/content.json",)  # of a draft in which they may bind; later ones, and this server, say no
OTHER_PATTERNS = ("optional/ecmascript-regex.json",)  # which the judge of drawn answers reads as Python does
ANSWERS = 4  # of each grammar
TOKENS = 120  # of an answer


@dataclass
class Count:
    """Of one draft under one backend."""

    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    valid: Counter[bool] = field(default_factory=Counter)  # instances, by whether the grammar takes them
    narrower: Counter[str] = field(default_factory=Counter)  # why valid ones are not taken
    invalid: Counter[bool] = field(default_factory=Counter)
    answers: int = 0
    wrong: list[str] = field(default_factory=list)  # what must not be


def groups(suite: Path, draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    tests = suite if (suite / draft).is_dir() else suite / "tests"
    for folder in FOLDERS:
        for file in sorted((tests / draft / folder).glob("*.json")):
            for group in json.loads(file.read_text(encoding="utf-8")):
                yield f"{folder}/{file.name}".lstrip("/"), group


def run(suite: Path, backend: Backend, draft: str) -> Count:
    from tests.grammar.walk import answer, takes

    count, rng = Count(), random.Random(0)
    judge_of = DRAFTS[draft]
    for file, group in groups(suite, draft):
        count.schemas += 1
        schema = group["schema"]
        try:
            grammar = backend.compile(GrammarSpec("json_schema", plain(schema, "json")))
        except InputError as error:
            count.refused[_reason(error.message)] += 1
            continue
        where = f"{draft}/{file}: {group['description']}"
        for test in group["tests"]:
            taken = takes(backend, grammar.matcher(), compact(test["data"]))
            if test["valid"]:
                count.valid[taken] += 1
                if not taken:
                    count.narrower[_narrower(test["data"], file)] += 1
            else:
                count.invalid[taken] += 1
                if taken and file not in ANNOTATIONS:
                    count.wrong.append(
                        f"{where}: takes {compact(test['data'])[:100]}, under {json.dumps(schema)[:200]}"
                    )
        judge = judge_of(schema, format_checker=judge_of.FORMAT_CHECKER)
        for _ in range(ANSWERS if file not in OTHER_PATTERNS else 0):
            text, is_complete = answer(backend, grammar.matcher(), rng, TOKENS, close_at_limit=True)
            if not is_complete:
                continue
            try:
                problem = next(judge.iter_errors(json.loads(text)), None)
            except re.error:
                continue  # a pattern that the judge cannot read
            except ValueError as error:
                problem = error
            count.answers += 1
            if problem is not None:
                count.wrong.append(f"{where}: wrote {text[:200]!r}: {str(problem)[:100]}")
    return count


def report(name: str, count: Count) -> None:
    refused = sum(count.refused.values())
    print(f"{name}: {count.schemas} schemas, {count.schemas - refused} taken, {refused} refused")
    print("  refused for:", ", ".join(f"{reason} {number}" for reason, number in count.refused.most_common()))
    print(f"  instances marked valid: {count.valid[True]} taken, {count.valid[False]} not", end="")
    print(f" ({', '.join(f'{reason} {number}' for reason, number in count.narrower.most_common())})")
    print(f"  instances marked invalid: {count.invalid[False]} not taken, {count.invalid[True]} taken")
    print(f"  {count.answers} answers drawn; wrong: {len(count.wrong)}")
    for wrong in count.wrong:
        print("   ", wrong)


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_REASONS = (  # what a message says, and what is counted
    (r"refers to|\$ref", "$ref elsewhere, or beside others"),
    (r"uses '(\S+?)'", ""),
    (r"format '(\S+?)'", ""),
    (r"'(\w+)' beside", ""),
    (r"(allOf) has several", ""),
    (r"oneOf", "oneOf of branches that overlap"),
    (r"\$id", "$id below the root"),
    (r"[Pp]attern at|regex", "pattern"),
    (r"is false|nsatisfiable|no value", "no value satisfies it"),
)


def _reason(message: str) -> str:
    for pattern, reason in _REASONS:
        found = re.search(pattern, message)
        if found is not None:
            return reason or found[1]
    return message.partition(": ")[2][:70]


def _narrower(value: Any, file: str) -> str:
    text = json.dumps(value)
    if re.search(r"\d\.0\b|[eE]|\d{17}", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        return "numbers written otherwise"
    if isinstance(value, dict):
        return "keys in another order, or not named"
    return f"others ({file})"
