"""The tables in docs/performance.md, from files in benchmarks/results.

    python -m benchmarks.report [COMMIT ...] [--device nvidia-h200] [--check]

Files are those of the commits and the device, of one rank; a figure is the first commit's that has it. Without a
commit, those that the page says it has. --check: exit 1 if the tables are not those of the files.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks import peers, results_file

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = re.compile(r"<!-- report: (\w+(?: \w+)*) (\S+) -->\n"), "<!-- report: end -->"
BESIDE_PEERS = ["qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b"]
# What a row is called, test, case ("" of T1: the median of its rounds), metric, digits.
FIGURES = [
    ("T1 256 requests, 100–1,024 in and out, tok/s", "T1", "", "output_tok_s", 0),
    ("T1b 1,000 requests, 32–1,024 in, 32–512 out, tok/s", "T1b", "", "output_tok_s", 0),
    ("T2 a decode step of 1 row, ms", "T2", "batch=1", "step_ms", 3),
    ("of 8 rows", "T2", "batch=8", "step_ms", 3),
    ("of 64 rows", "T2", "batch=64", "step_ms", 3),
    ("T3 one prompt of 1,024 tokens, ms", "T3", "1x1024", "ttft_ms", 1),
    ("of 8,192", "T3", "1x8192", "ttft_ms", 1),
    ("of 32,768", "T3", "1x32768", "ttft_ms", 0),
    ("16 of 4,096", "T3", "16x4096", "ttft_ms", 0),
    ("T4 256 prompts that share 4,096 tokens, s", "T4", "", "seconds", 2),
    ("T6 process start to first token, cold, s", "T6", "cold", "first_token_s", 1),
    ("warm", "T6", "warm", "first_token_s", 1),
]
SHORT = ["T1", "T2 1", "8", "64", "T3 1,024", "8,192", "32,768", "16 × 4,096"]
OF_SHORT = [0, 2, 3, 4, 5, 6, 7, 8]  # of FIGURES


class Measured(NamedTuple):
    value: float
    floor: float | None


def measured(commit: str, device: str) -> dict[tuple[str, str, str, str], Measured]:
    """By model, test, case and metric; of rounds the median."""
    values: dict[tuple[str, str, str, str], list[Measured]] = {}
    for path in sorted(results_file.FOLDER.glob(f"*-{commit}-{device}*.json")):
        if path.stem.endswith(("-ranks", "-transformers")):
            continue
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            case = "" if row["case"].startswith("round=") else row["case"]
            key = row["model"], row["test"], case, row["metric"]
            values.setdefault(key, []).append(Measured(row["value"], row.get("floor")))
    return {key: Measured(statistics.median(one.value for one in each), each[0].floor) for key, each in values.items()}


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def bold(text: str, wins: bool | None) -> str:
    return f"**{text}**" if wins else text


def peer(model: str, test: str, case: str, metric: str) -> float | None:
    """Of rounds the median."""
    cases = [case] if case or test == "T1b" else ["round=0", "round=1"]
    found = [value for one in cases if (value := peers.best(test, model, one, metric)) is not None]
    return statistics.median(found) if found else None


def tables(commits: list[str], device: str) -> str:
    found: dict[tuple[str, str, str, str], Measured] = {}
    for commit in commits:
        if not (more := measured(commit, device)):
            raise SystemExit(f"no file of {commit} on {device} in {results_file.FOLDER}")
        found = more | found
    lines = ["| | " + " | ".join(f"{model} | peer | floor" for model in BESIDE_PEERS) + " |"]
    lines.append("|---" * (1 + 3 * len(BESIDE_PEERS)) + "|")
    for title, test, case, metric, digits in FIGURES:
        cells = [title]
        for model in BESIDE_PEERS:
            one, theirs = found.get((model, test, case, metric)), peer(model, test, case, metric)
            ours = one.value if one else None
            first = None if ours is None or theirs is None else (ours > theirs) == (metric == "output_tok_s")
            cells += [bold(number(ours, digits), first), bold(number(theirs, digits), first is False)]
            cells.append(number(one.floor if one else None, digits))
        lines.append("| " + " | ".join(cells) + " |")
    others = sorted({model for model, *of in found if tuple(of) in {FIGURES[index][1:4] for index in OF_SHORT}})
    lines += ["", "| | " + " | ".join(SHORT) + " |", "|---" * (1 + len(SHORT)) + "|"]
    for model in others:
        cells = [model]
        for index in OF_SHORT:
            _, test, case, metric, digits = FIGURES[index]
            one = found.get((model, test, case, metric))
            cells.append(f"{number(one.value, digits)} ({number(one.floor, digits)})" if one else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*")
    parser.add_argument("--device", default="nvidia-h200")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    begin = BEGIN.search(page)
    assert begin
    commits, device = (args.commits, args.device) if args.commits else (begin[1].split(), begin[2])
    wanted = f"<!-- report: {' '.join(commits)} {device} -->\n{tables(commits, device)}\n"
    wanted = page[: begin.start()] + wanted + page[page.index(END) :]
    if args.check:
        sys.exit(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
