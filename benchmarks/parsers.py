"""Tool parsers, shown right and timed: however an answer is cut, the pieces are the same and mean what was written.

    python -m benchmarks.parsers [--answers 500] [--seed 0] [--format NAME ...] [--skip-sweep]

The sweep makes up answers in every format and feeds each whole, in all single cuts, all pairs of cuts (short answers),
one character at a time, in tokens of a real tokenizer and in random portions; then the same of answers with characters
lost, doubled, mixed up or cut off, which must be read alike however they are cut. The times are CPU times of one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import quire.demo_model
from benchmarks.parser_answers import WRITERS, Answer, make
from quire.parsers.base import TOOL_FORMATS, ToolFormat
from quire.types.reply import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning, Tool

PAIRS_UP_TO = 48  # characters of an answer whose pairs of cuts are all tried
Joined = list[tuple[Any, ...]]


class FlawError(AssertionError):
    """An answer was read wrongly."""


def read(form: ToolFormat, tools: list[Tool], portions: Iterable[str], *, parallel: bool = True) -> list[Piece]:
    parser = form.parser(tools, parallel=parallel)
    return [piece for portion in portions for piece in parser.feed(portion)] + parser.finish()


def join(pieces: Iterable[Piece], id_pattern: str = ".*") -> Joined:
    """Pieces that are alike joined; checks their order and their ids on the way."""
    joined: Joined = []
    ids: set[str] = set()
    begun = -1
    is_open = False
    for piece in pieces:
        match piece:
            case Content(text) | Reasoning(text):
                kind = type(piece).__name__.lower()
                check(bool(text), f"empty {kind}")
                if joined and joined[-1][0] == kind:
                    joined[-1] = (kind, joined[-1][1] + text)
                else:
                    joined.append((kind, text))
            case CallStart(index, call_id, name):
                check(index == begun + 1, "calls out of order")
                check(bool(re.fullmatch(id_pattern, call_id)) and call_id not in ids, f"id {call_id!r}")
                ids.add(call_id)
                begun, is_open = index, True
                joined.append(("start", index, name))
            case CallArguments(index, text):
                check(bool(text) and is_open and index == begun, "arguments outside their call")
                if joined[-1][0] == "arguments":
                    joined[-1] = ("arguments", index, joined[-1][2] + text)
                else:
                    joined.append(("arguments", index, text))
            case CallEnd(index):
                check(is_open and index == begun and joined[-1][0] == "arguments", "the end of no call")
                check(isinstance(json.loads(joined[-1][2]), dict), "a whole call is one JSON object")
                is_open = False
                joined.append(("end", index))
    return joined


def check(holds: bool, what: str) -> None:
    if not holds:
        raise FlawError(what)


def cuts(text: str, rng: random.Random) -> Iterator[list[str]]:
    """All the ways to cut `text` that are tried."""
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    if len(text) <= PAIRS_UP_TO:
        for first, second in itertools.combinations(range(1, len(text)), 2):
            yield [text[:first], text[first:second], text[second:]]
    yield from portions(text, rng)


def portions(text: str, rng: random.Random) -> Iterator[list[str]]:
    yield list(text)
    yield tokens(text)
    for mean in (2, 5, 20):
        yield cut_at(text, (at for at in range(1, len(text)) if rng.random() < 1 / mean))


def cut_at(text: str, places: Iterable[int]) -> list[str]:
    borders = [0, *places, len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def tokens(text: str) -> list[str]:
    """As the demo model's tokenizer cuts it."""
    offsets = _tokenizer().encode(text, add_special_tokens=False).offsets
    return cut_at(text, sorted({start for start, _ in offsets if 0 < start < len(text)}))


_TOKENIZERS: list[Any] = []


def _tokenizer() -> Any:
    if not _TOKENIZERS:
        from tokenizers import Tokenizer

        path = Path(quire.demo_model.__path__[0]) / "tokenizer.json"
        _TOKENIZERS.append(Tokenizer.from_file(str(path)))
    return _TOKENIZERS[0]


def broken(text: str, rng: random.Random) -> str:
    """`text` with a flaw: cut off, a piece lost, doubled or put elsewhere, or all its tags mixed up."""
    kind = rng.randrange(5)
    start = rng.randrange(len(text))
    end = min(len(text), start + rng.choice((1, 1, 3, 20)))
    if kind == 0:
        return text[:start]
    if kind == 1:
        return text[:start] + text[end:]
    if kind == 2:
        return text[:end] + text[start:end] + text[end:]
    if kind == 4:
        parts = re.findall(r"<[^<>]*>|[^<>]{1,6}|[<>]", text)
        return "".join(rng.choices(parts, k=rng.randrange(1, 40)))
    at = rng.randrange(len(text))
    return text[:at] + text[start:end] + text[at:]


def check_answer(name: str, answer: Answer, rng: random.Random) -> int:
    """Reads `answer` cut in all ways. Returns how many; raises FlawError for the first that is read wrongly."""
    form, writer = TOOL_FORMATS.get(name), WRITERS[name]
    whole = join(read(form, answer.tools, [answer.text]), writer.id_pattern)
    content = "".join(item[1] for item in whole if item[0] == "content")
    expected = r"\s*".join(map(re.escape, answer.content))
    check(bool(re.fullmatch(expected, content)), f"content {content!r}, not {answer.content!r}, of {answer.text!r}")
    names = [item[2] for item in whole if item[0] == "start"]
    arguments = [json.loads(item[2]) for item in whole if item[0] == "arguments"]
    found = list(zip(names, arguments, strict=True))
    check(found == answer.calls, f"calls {found!r}, not {answer.calls!r}, of {answer.text!r}")
    check(sum(item[0] == "end" for item in whole) == len(answer.calls), f"a call did not end in {answer.text!r}")
    count = 1
    for cut in cuts(answer.text, rng):
        streamed = join(read(form, answer.tools, cut), writer.id_pattern)
        check(streamed == whole, f"{streamed!r}, whole {whole!r}, cut {cut!r}")
        count += 1
    first = join(read(form, answer.tools, tokens(answer.text), parallel=False), writer.id_pattern)
    calls = [item for item in first if item[0] != "content"]
    check(calls == [item for item in whole if item[0] != "content" and item[1] == 0], f"one call of {answer.text!r}")
    return count + 1


def check_broken(name: str, answer: Answer, rng: random.Random) -> int:
    """The same of a text with flaws: no error, no difference."""
    form = TOOL_FORMATS.get(name)
    text = broken(answer.text, rng)
    whole = join(read(form, answer.tools, [text]))
    count = 1
    for cut in portions(text, rng):
        streamed = join(read(form, answer.tools, cut))
        check(streamed == whole, f"{streamed!r}, whole {whole!r}, cut {cut!r}")
        count += 1
    return count


def sweep(name: str, answers: int, seed: int) -> tuple[int, int]:
    """`answers` of one format, as many with flaws: (ways in which they were read, bytes of the answers)."""
    rng = random.Random(seed + zlib.crc32(name.encode()))
    reads = size = 0
    for _ in range(answers):
        answer = make(name, rng)
        size += len(answer.text)
        reads += check_answer(name, answer, rng)
        reads += check_broken(name, answer, rng)
    return reads, size


def microseconds(name: str, portions: list[str]) -> float:
    """Of feed(), a portion: the best of some runs."""
    form = TOOL_FORMATS.get(name)
    best = float("inf")
    for _ in range(5):
        parser = form.parser([], parallel=True)
        start = time.process_time()
        for portion in portions:
            parser.feed(portion)
        best = min(best, time.process_time() - start)
        parser.finish()
    return best / len(portions) * 1e6


def times(name: str) -> tuple[float, float]:
    """Microseconds a token of plain content, and of arguments."""
    words = ["The", " answer", " is", " 42", ".", " It", " takes", " some", " time", ","] * 500
    rng = random.Random(0)
    text = " ".join(rng.choices(("alpha", "beta", "gamma", "delta"), k=4000))
    call = WRITERS[name].calls([("f_write", {"text": text})], rng)
    return microseconds(name, words), microseconds(name, tokens(call))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--answers", type=int, default=500, help="of each format; as many again have flaws")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--format", nargs="+", default=list(WRITERS), dest="formats")
    options.add_argument("--skip-sweep", action="store_true")
    chosen = options.parse_args()
    print(f"{'format':18} {'answers':>8} {'readings':>9} {'flaws':>6}   µs a token: content, arguments")
    flaws = 0
    for name in chosen.formats:
        reads, flaw = 0, ""
        if not chosen.skip_sweep:
            try:
                reads, _ = sweep(name, chosen.answers, chosen.seed)
            except FlawError as error:
                flaw = str(error)
                flaws += 1
        content, arguments = times(name)
        made = 0 if chosen.skip_sweep else 2 * chosen.answers
        print(f"{name:18} {made:8} {reads:9} {int(bool(flaw)):6}   {content:6.2f} {arguments:6.2f}", flush=True)
        if flaw:
            print(f"  {flaw[:2000]}")
    print(f"{flaws} formats with flaws")
    return int(flaws > 0)


if __name__ == "__main__":
    sys.exit(main())
