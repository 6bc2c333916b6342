"""Reasoning formats, shown right and timed: however an answer is cut, it splits as it was written.

    python -m benchmarks.reasoning [--answers 500] [--seed 0] [--format NAME ...]

Each made-up answer is fed whole, in all single cuts, one character at a time and in random portions. The times are of
one core: microseconds a token of plain text, inside the reasoning and behind it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable

from benchmarks.reasoning_answers import WRITERS, Written, cuts
from quire.frontend.replies import Reply, ReplyPlan, ReplyWish
from quire.frontend.reply_formats import Formats
from quire.parsers.base import REASONING_FORMATS

WORDS = [
    f" {word}"
    for word in [
        "plain",
        "words",
        "of",
        "an",
        "answer",
        "with",
        "nothing",
        "to",
        "find",
        "in",
        "them,",
        "and",
        "no",
        "end",
    ]
] * 1000


def plan_of(name: str, written: Written) -> ReplyPlan:
    formats = Formats(reasoning=REASONING_FORMATS.get(name))
    return ReplyPlan(formats, ReplyWish(), written.prompt, written.kwargs)


def parsed(plan: ReplyPlan, portions: Iterable[str]) -> Reply:
    parser, reply = plan.parser(), Reply()
    for portion in portions:
        reply.add(parser.feed(portion))
    return reply.add(parser.finish())


def sweep(name: str, answers: int, seed: int, most_cuts: int) -> tuple[int, list[str]]:
    """How many readings were compared, and the answers that were split otherwise than written."""
    rng = random.Random(f"{name} {seed}")
    readings, flaws = 0, []
    for _ in range(answers):
        written = WRITERS[name](rng)
        plan, expected = plan_of(name, written), Reply(written.reasoning, written.content)
        for portions in ([written.text], *cuts(written.text, rng, most_cuts)):
            readings += 1
            if parsed(plan, portions) != expected:
                flaws.append(repr((written, portions)))
                break
    return readings, flaws


def microseconds(name: str, start: str) -> float:
    """A token; best of three."""
    plan = plan_of(name, Written("", "", "", prompt="<|assistant|>"))
    best = float("inf")
    for _ in range(3):
        parser = plan.parser()
        parser.feed(start)
        began = time.perf_counter()
        for word in WORDS:
            parser.feed(word)
        best = min(best, time.perf_counter() - began)
    return best / len(WORDS) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", nargs="+", default=list(WRITERS), choices=list(WRITERS))
    args = parser.parse_args()
    print(f"{'format':26}{'answers':>8}{'readings':>10}{'flaws':>7}{'µs thinking':>13}{'µs content':>12}")
    total = 0
    for name in args.format:
        readings, flaws = sweep(name, args.answers, args.seed, most_cuts=10**9)
        total += len(flaws)
        form = REASONING_FORMATS.get(name)
        times = [microseconds(name, form.start), microseconds(name, f"{form.start}hm{form.end}so")]
        print(f"{name:26}{args.answers:8}{readings:10,}{len(flaws):7}{times[0]:13.2f}{times[1]:12.2f}", flush=True)
        for flaw in flaws[:3]:
            print(f"  {flaw}")
    if total:
        raise SystemExit(f"{total} flaws")


if __name__ == "__main__":
    main()
