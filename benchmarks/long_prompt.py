"""Streams that go on while somebody's long prompt is computed: the gaps between their tokens, before, beside it, after.

    python -m benchmarks.long_prompt [--model llama-3.1-8b] [--streams 32] [--prompt 130900] [--rounds 2]

The core runs in a process of its own, as for a server; times are taken where its messages are read. The engine has been
idle for some seconds before the streams begin.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import results_file, workloads
from benchmarks.results_file import Row
from benchmarks.serve_load import percentile
from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.engine.client import ProcessClient
from quire.types.request import EngineRequest, token_array
from quire.types.sampling import RequestOutputKind, SamplingParams

IDLE, ALONE = 4.0, 2.0  # seconds before the streams begin, and of streams alone on either side of the long prompt
PROMPT = 128  # tokens of a stream's prompt


class Bench:
    def __init__(self, model: str, streams: int, prompt: int, options: dict[str, object]) -> None:
        folder = workloads.write_model_dir(model, Path(tempfile.mkdtemp()) / model)
        config = EngineConfig.from_flat(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, disable_log_stats=True, **options
        )
        self.client = ProcessClient(resolve(config))
        self.streams, self.prompt = streams, prompt
        self.times: dict[str, list[float]] = {}  # at which each request's tokens came

    def add(self, name: str, length: int, tokens: int) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        ids = workloads.token_ids(random.Random(name), length)
        self.times[name] = []
        self.client.add(EngineRequest(id=name, token_ids=token_array(ids), params=params, max_tokens=tokens))

    def read(self) -> None:
        outputs = self.client.poll(60)
        now = time.perf_counter()
        for output in outputs.special:
            assert output.error is None, output.error
        for name in itertools.chain(outputs.ids or (), (output.request_id for output in outputs.special)):
            self.times[name].append(now)

    def read_for(self, seconds: float) -> None:
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            self.read()

    def run(self, number: int) -> tuple[list[Row], list[float]]:
        """One round: its rows, and the gaps of one of the streams beside the long prompt, in order."""
        time.sleep(IDLE)
        names = [f"{number}-{stream}" for stream in range(self.streams)]
        for name in names:
            self.add(name, PROMPT, 20_000)
        while not all(len(self.times[name]) > 2 for name in names):
            self.read()
        marks = [time.perf_counter()]
        self.read_for(ALONE)
        long = f"{number}-long"
        marks.append(time.perf_counter())
        self.add(long, self.prompt, 1)
        added = time.perf_counter()
        while not self.times[long]:
            self.read()
        marks.append(self.times[long][0])
        self.read_for(ALONE)
        marks.append(time.perf_counter())
        self.client.abort(names)
        rows = [Row("LP", "", f"round={number}", "ttft_s", round(marks[2] - added, 3), "s")]
        for part, (begin, end) in zip(("before", "beside", "after"), itertools.pairwise(marks), strict=True):
            gaps = [gap * 1e3 for name in names for gap in self._gaps(name, begin, end)]
            found = {"p50": percentile(gaps, 50), "p99": percentile(gaps, 99), "longest": max(gaps)}
            rows += [
                Row("LP", "", f"round={number}", f"{part}_gap_{what}_ms", round(v, 2), "ms")
                for what, v in found.items()
            ]
        return rows, [round(gap * 1e3, 1) for gap in self._gaps(names[0], marks[1], marks[2])]

    def _gaps(self, name: str, begin: float, end: float) -> list[float]:
        """Between tokens of which the second came in that time, seconds."""
        return [b - a for a, b in itertools.pairwise(self.times[name]) if begin < b <= end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(workloads.MODELS))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=130_900, help="tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=results_file.FOLDER)
    parser.add_argument("--options", default="{}", help="engine options as a JSON object")
    args = parser.parse_args()
    bench = Bench(args.model, args.streams, args.prompt, json.loads(args.options))
    rows, gaps = [], {}
    for number in range(args.rounds):
        found, gaps[number] = bench.run(number)
        rows += found
    for row in rows:
        row.model = args.model
    device = bench.client.info.report.device
    bench.client.shutdown()
    print(results_file.table(rows))
    settings = {**vars(args), "out": str(args.out), "gaps_beside": gaps}
    command = " ".join(["python -m benchmarks.long_prompt", *sys.argv[1:]])
    print(results_file.write(rows, device, command, settings, args.out, "long-prompt"))


if __name__ == "__main__":
    main()
