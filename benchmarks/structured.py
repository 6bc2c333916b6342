"""What constraints cost: streams with and without a grammar in one engine, with random weights.

    python -m benchmarks.structured [--model llama-3.1-8b] [--streams 64] [--tokens 256] [--rounds 3] [--out FOLDER]
        [--options '{"enforce_eager": true}']

Tokens a second: one batch of 128-token prompts, read at the end, all requests to the last token; each case in turn,
`--rounds` times, medians. The grammars cannot end before `--tokens`. They are compiled before anything is timed.
free: no constraint. json: an array of records, one schema for all. regex: words. open: a regex of any text without an
x, of which each place is another one. thinking: the same schema behind a marker that hardly ever comes. half, half
open: json, open for every other stream.
Gaps: the same, streamed: the time between two tokens of the streams that are free, alone and beside the others; and of
these runs, what the core did in its steps, phase by phase: the middle step, the 99th percentile, the longest, and the
mean of the slowest 1 %. "mask" is all that the brain does for masks, "gc" is part of the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import results_file, workloads
from benchmarks.laps import Laps, slowest, spread
from benchmarks.results_file import Row
from benchmarks.serve_load import percentile
from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.engine.client import InProcessClient
from quire.frontend.structured import grammar_of
from quire.types.request import EngineRequest, token_array
from quire.types.sampling import RequestOutputKind, SamplingParams
from quire.types.structured import Constraint, GrammarSpec, StructuredOutputsParams, Thinking

TEMPERATURE = 0.6
LONGEST_WORD = 5  # characters of a token of the made-up vocabulary
PROMPT = 128  # tokens
RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "scores": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["id", "name", "kind", "scores"],
    "additionalProperties": False,
}
Bind = Callable[[int], Constraint | None]  # of stream i


def cases(tokens: int) -> dict[str, Bind]:
    schema = {"type": "array", "items": RECORD, "minItems": tokens}
    json_grammar = grammar_of(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    words = grammar_of(StructuredOutputsParams(regex=rf"([a-z]+ ){{{tokens},}}"))
    text = grammar_of(StructuredOutputsParams(regex=rf"[^x]{{{LONGEST_WORD * tokens},}}"))
    never = Thinking(end=[workloads.FIRST_ID - 1], max_tokens=10 * tokens)

    def always(grammar: GrammarSpec, thinking: Thinking | None = None) -> Bind:
        return lambda _: Constraint(grammar, thinking)

    return {
        "free": lambda _: None,
        "json": always(json_grammar),
        "regex": always(words),
        "open": always(text),
        "thinking": always(json_grammar, never),
        "half": lambda stream: Constraint(json_grammar) if stream % 2 else None,
        "half open": lambda stream: Constraint(text) if stream % 2 else None,
    }


class Bench:
    def __init__(self, model: str, streams: int, tokens: int, options: dict[str, object]) -> None:
        folder = workloads.write_model_dir(model, Path(tempfile.mkdtemp()) / model, tokenizer=True)
        config = EngineConfig.from_flat(model=str(folder), load_format="dummy", disable_log_stats=True, **options)
        self.laps = Laps()
        self.client = InProcessClient(resolve(config), clock=self.laps)
        self.streams, self.tokens = streams, tokens
        self._num_runs = 0
        self.num_started = 0  # steps of the latest run before all its streams had a token

    def run(self, bind: Bind, tokens: int, *, streamed: bool = False) -> tuple[float, list[float]]:
        """Seconds of all requests of so many tokens, and the gaps between tokens of those that are free."""
        self._num_runs += 1
        kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
        prompts = workloads.t2(self.streams, self._num_runs)
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=tokens, ignore_eos=True, output_kind=kind)
        began = time.perf_counter()
        free: dict[str, list[float]] = {}
        for stream, (ids, _) in enumerate(prompts):
            constraint, name = bind(stream), f"{self._num_runs}-{stream}"
            if constraint is None:
                free[name] = []
            self.client.add(
                EngineRequest(
                    id=name, token_ids=token_array(ids[:PROMPT]), params=params, max_tokens=tokens, seed=stream,
                    constraint=constraint,
                )
            )  # fmt: skip
        unfinished, lengths = len(prompts), 0
        silent = {f"{self._num_runs}-{stream}" for stream in range(len(prompts))}
        self.laps.steps.clear()
        while unfinished:
            outputs = self.client.poll(60)
            now = time.perf_counter()
            if silent:
                silent.difference_update(output.request_id for output in outputs.special)
                self.num_started = len(self.laps.steps)
            lengths += len(outputs.tokens) + sum(len(output.token_ids) for output in outputs.special)
            for name in itertools.chain(outputs.ids or (), (output.request_id for output in outputs.special)):
                if name in free:
                    free[name].append(now)
            for output in outputs.special:
                assert output.error is None, output.error
                unfinished -= output.finish_reason is not None
        seconds = time.perf_counter() - began
        assert lengths == self.streams * tokens, f"{lengths} tokens came: an answer ended early"
        return seconds, [b - a for times in free.values() for a, b in itertools.pairwise(times)]

    def phases(self) -> dict[str, float]:
        stats = self.client.stats()
        return {**stats.phase_seconds, "steps": stats.num_steps}


def measure(bench: Bench, rounds: int) -> tuple[list[Row], dict[str, dict[str, float]], dict[str, Any]]:
    """Rows without model; where the core's time went, milliseconds a step by case and phase; and how it was spread
    over the steps of streamed runs, by case."""
    binds = cases(bench.tokens)
    for bind in binds.values():  # compiles grammars, and warms up
        bench.run(bind, 8)
    seconds: dict[str, list[float]] = {name: [] for name in binds}
    spent: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name, bind in binds.items():
            before = bench.phases()
            seconds[name].append(bench.run(bind, bench.tokens)[0])
            after = bench.phases()
            steps = after["steps"] - before["steps"]
            spent[name] = {
                phase: round((after[phase] - before.get(phase, 0.0)) / steps * 1e3, 4)
                for phase in after
                if phase != "steps"
            }
    total = bench.streams * bench.tokens
    rates = {name: total / statistics.median(times) for name, times in seconds.items()}
    rows = [Row("SO", "", name, "output_tok_s", round(rate, 1), "tok/s") for name, rate in rates.items()]
    rows += [Row("SO", "", name, "of_free", round(rate / rates["free"], 4), "") for name, rate in rates.items()]
    tails: dict[str, Any] = {}
    for name in ("free", "half", "half open", "json"):
        _, gaps = bench.run(binds[name], bench.tokens, streamed=True)
        decodes = bench.laps.steps[bench.num_started :]
        tails[name] = {"p50, p99, max": spread(decodes), "slowest": slowest(decodes)}
        for share in (50, 99) if gaps else ():
            rows.append(Row("SO", "", name, f"gap_p{share}_ms", round(percentile(gaps, share) * 1e3, 3), "ms"))
    return rows, spent, tails


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(workloads.MODELS))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    parser.add_argument("--options", default="{}", help="engine options as a JSON object")
    args = parser.parse_args()
    bench = Bench(args.model, args.streams, args.tokens, json.loads(args.options))
    rows, spent, steps = measure(bench, args.rounds)
    for row in rows:
        row.model = args.model
    device = bench.client.info.report.device
    bench.client.shutdown()
    print(results_file.table(rows))
    for name, phases in spent.items():
        print(f"{name:10} ms a step: " + "  ".join(f"{phase} {value:.2f}" for phase, value in phases.items()))
    for name, found in steps.items():
        print(f"{name:10} streamed, ms p50/p99/max a step: " + _line(found["p50, p99, max"]))
        print(f"{'':10} the slowest 1 %: " + _line({phase: [value] for phase, value in found["slowest"].items()}))
    settings = {**vars(args), "out": str(args.out), "ms_a_step": spent, "steps": steps}
    command = " ".join(["python -m benchmarks.structured", *sys.argv[1:]])
    print(results_file.write(rows, device, command, settings, args.out, "structured"))


def _line(phases: dict[str, list[float]]) -> str:
    return "  ".join(f"{phase} {'/'.join(f'{value:.2f}' for value in values)}" for phase, values in phases.items())


if __name__ == "__main__":
    main()
