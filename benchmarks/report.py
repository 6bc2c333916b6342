"""The tables in docs/performance.md, and the one in README.md, from files in benchmarks/results.

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

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
BEGIN, END = re.compile(r"<!-- report: (\w+(?: \w+)*) (\S+) -->\n"), "<!-- report: end -->"
BEGIN_SHORT = "<!-- report -->\n"
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
IN_README = {
    0: "256 requests at once, 100–1,024 tokens in and out (output tok/s)",
    2: "decode at batch 1 (ms a token)",
    4: "decode at batch 64 (ms a step)",
    7: "first token of a 32,768-token prompt (ms)",
    9: "256 requests that share 4,096 tokens, 64 out (s)",
    11: "process start to first token, second start (s)",
}  # of FIGURES


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


Found = dict[tuple[str, str, str, str], Measured]


def of_commits(commits: list[str], device: str) -> Found:
    """Each figure from the first commit that has it."""
    found: Found = {}
    for commit in commits:
        if not (more := measured(commit, device)):
            raise SystemExit(f"no file of {commit} on {device} in {results_file.FOLDER}")
        found = more | found
    return found


def tables(found: Found) -> str:
    """Of the page."""
    lines = beside_peers(found, {number: title for number, (title, *_) in enumerate(FIGURES)}, floors=True)
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


def beside_peers(found: Found, titles: dict[int, str], *, floors: bool) -> list[str]:
    """A table's lines. titles: of those FIGURES that it has."""
    columns = " | peer | floor" if floors else " | peer"
    lines = ["| | " + " | ".join(f"{model}{columns}" for model in BESIDE_PEERS) + " |"]
    lines.append("|---" * (1 + (3 if floors else 2) * len(BESIDE_PEERS)) + "|")
    for index, title in titles.items():
        _, test, case, metric, digits = FIGURES[index]
        cells = [title]
        for model in BESIDE_PEERS:
            one, theirs = found.get((model, test, case, metric)), peer(model, test, case, metric)
            ours = one.value if one else None
            first = None if ours is None or theirs is None else (ours > theirs) == (metric == "output_tok_s")
            cells += [bold(number(ours, digits), first), bold(number(theirs, digits), first is False)]
            cells += [number(one.floor if one else None, digits)] if floors else []
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def between(text: str, begin: str, wanted: str) -> str:
    """The text with what is `wanted` from `begin`, which it may change, up to the next END."""
    start = text.index(begin)
    return text[:start] + wanted + text[text.index(END, start) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*")
    parser.add_argument("--device", default="nvidia-h200")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    page, readme = PAGE.read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
    begin = BEGIN.search(page)
    assert begin
    commits, device = (args.commits, args.device) if args.commits else (begin[1].split(), begin[2])
    found = of_commits(commits, device)
    short = "\n".join(beside_peers(found, IN_README, floors=False))
    wanted = {
        PAGE: between(page, begin[0], f"<!-- report: {' '.join(commits)} {device} -->\n{tables(found)}\n"),
        README: between(readme, BEGIN_SHORT, f"{BEGIN_SHORT}{short}\n"),
    }
    if args.check:
        sys.exit(wanted != {PAGE: page, README: readme})
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
