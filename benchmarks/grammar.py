"""What grammars cost, and whether made-up answers under them are right; without any model.

    python -m benchmarks.grammar [--model FOLDER] [--vocab-size N] [--schemas 1000] [--backend xgrammar]
    python -m benchmarks.grammar --suite FOLDER [--backend xgrammar]
    python -m benchmarks.grammar --engine [--suite FOLDER] [--schemas 1000] [--backend xgrammar]

For each kind of grammar: milliseconds to compile it, microseconds to fill a row (mean, 99th percentile, longest), alone
and in batches of 64, to take a token, and to fill one while the answer is being closed near its limit. Then answers of
many made-up JSON schemas, drawn under the mask and closed in time, are checked by `jsonschema`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np

from benchmarks import grammar_models, grammar_suite, results_file
from quire.config.resolve import DEMO_MODEL
from quire.grammar.base import Backend
from quire.grammar.json_schema.normalize import plain
from quire.grammar.vocabulary import Vocabulary
from quire.types.structured import GRAMMAR_BACKENDS, GrammarSpec

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "kind": {"enum": ["a", "bb", "ccc"]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street"],
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "type": "triggered_tags",
    "triggers": ["<tool_call>"],
    "tags": [
        {
            "begin": '<tool_call>{"name": "look_up", "arguments": ',
            "content": {"type": "json_schema", "json_schema": PERSON},
            "end": "}</tool_call>",
        }
    ],
    "at_least_one": True,
}
SPECS = {
    "JSON object": GrammarSpec("json_object", ""),
    "JSON schema": GrammarSpec("json_schema", plain(PERSON, "json")),
    "long strings": GrammarSpec("json_schema", '{"type":"array","items":{"type":"string","maxLength":2000}}'),
    "regex": GrammarSpec("regex", r"[a-z]+@[a-z]+\.(com|org)"),
    "choice of 1000": GrammarSpec("choice", json.dumps([f"option number {i}" for i in range(1000)])),
    "tool call": GrammarSpec("structural_tag", json.dumps(TAG)),
}
LONGEST = 60  # tokens of an answer
BATCH = 64


def tokens_of(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()  # type: ignore[no-any-return]


def measure(backend: Backend, spec: GrammarSpec, answers: int) -> list[float]:
    rng = random.Random(0)
    began = time.perf_counter()
    grammar = backend.compile(spec)
    compiled = time.perf_counter() - began
    words = -(-backend.vocabulary.size // 32)
    row, fills, takes, closes = np.zeros(words, np.int32), [], [], []
    for _ in range(answers):
        matcher = grammar.matcher()
        for left in range(LONGEST, 0, -1):
            began = time.perf_counter()
            backend.close_soon(matcher, left, row)
            closing = time.perf_counter()
            allowed = tokens_of(row)
            between = time.perf_counter()
            matcher.fill(row)
            filled = time.perf_counter()
            matcher.accept(rng.choice(allowed))
            takes.append(time.perf_counter() - filled)
            fills.append(filled - between)
            closes.append(closing - began)
            if matcher.is_done:
                break
    matchers, rows, batches = [grammar.matcher() for _ in range(BATCH)], np.zeros((BATCH, words), np.int32), []
    for _ in range(20):
        began = time.perf_counter()
        backend.fill(matchers, rows)
        batches.append(time.perf_counter() - began)
        for matcher, line in zip(matchers, rows, strict=True):
            matcher.accept(rng.choice(tokens_of(line)))
        matchers = [grammar.matcher() if m.is_done else m for m in matchers]
    micro = np.array(fills) * 1e6
    return [
        compiled * 1e3,
        micro.mean(),
        float(np.percentile(micro, 99)),
        micro.max(),
        float(np.mean(batches)) / BATCH * 1e6,
        float(np.mean(takes)) * 1e6,
        float(np.mean(closes)) * 1e6,
    ]


def sweep(count: int, backend: str) -> None:
    """On the demo model's vocabulary. Raises at the first answer that is wrong."""
    from tests.grammar.test_json_schemas import check

    began = time.perf_counter()
    taken = sum(check(seed, backend) for seed in range(count))
    seconds = time.perf_counter() - began
    print(f"{count} made-up schemas, {taken} taken: all answers closed in time and valid ({seconds:.0f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="folder with a tokenizer.json")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--stop-ids", type=int, nargs="+", default=[0])
    parser.add_argument("--answers", type=int, default=20, help="of each grammar")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--backend", default="llguidance", choices=list(GRAMMAR_BACKENDS))
    parser.add_argument("--suite", type=Path, help="run the official JSON-Schema-Test-Suite there, and nothing else")
    parser.add_argument("--engine", action="store_true", help="let models answer under the schemas, and nothing else")
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    options = parser.parse_args()
    if options.engine:
        grammar_models.run(options.schemas, options.suite, options.backend, options.out)
        return
    if options.suite is not None:
        vocabulary = Vocabulary(DEMO_MODEL, 4096, [0])
        for draft in grammar_suite.DRAFTS:
            count = grammar_suite.run(options.suite, GRAMMAR_BACKENDS.get(options.backend)(vocabulary), draft)
            grammar_suite.report(f"{options.backend}, {draft}", count)
        return
    began = time.perf_counter()
    vocabulary = Vocabulary(options.model, options.vocab_size, options.stop_ids)
    read = time.perf_counter()
    backend = GRAMMAR_BACKENDS.get(options.backend)(vocabulary)
    print(f"vocabulary of {vocabulary.size}: read {read - began:.2f} s, tables {time.perf_counter() - read:.2f} s")
    print(f"{'':16}{'compile ms':>11}{'fill us':>9}{'p99':>8}{'max':>8}{'of 64':>8}{'take us':>9}{'close us':>10}")
    for name, spec in SPECS.items():
        figures = measure(backend, spec, options.answers)
        widths = (11, 9, 8, 8, 8, 9, 10)
        print(f"{name:16}" + "".join(f"{value:{width}.1f}" for value, width in zip(figures, widths, strict=True)))
    if options.schemas:
        sweep(options.schemas, options.backend)


if __name__ == "__main__":
    main()
