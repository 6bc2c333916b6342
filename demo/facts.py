"""The facts the demo model is taught: tables with the ways people ask about them, read from `facts.ini`."""

from __future__ import annotations

from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

from demo.words import options

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Relation:
    """One table. `{s}` and `{o}` stand for subject and object in its questions and its answer."""

    name: str
    pairs: Pairs
    questions: tuple[str, ...]
    answer: str


def _pairs(text: str) -> Pairs:
    """Read `subject: object` entries separated by semicolons."""
    entries = (entry.partition(": ") for entry in options(text, ";"))
    return tuple((subject, obj) for subject, _, obj in entries)


def _read(path: Path) -> dict[str, Relation]:
    parser = ConfigParser(interpolation=None, delimiters=("=",))
    parser.read_string(path.read_text(encoding="utf-8"))
    relations: dict[str, Relation] = {}
    for name in parser.sections():
        section = parser[name]
        if "reversed" in section:
            pairs = tuple((obj, subject) for subject, obj in relations[section["reversed"]].pairs)
        else:
            pairs = _pairs(section["facts"])
        relations[name] = Relation(name, pairs, options(section["ask"]), section["answer"])
    return relations


def _products() -> Relation:
    numbers, signs = range(1, 13), ("times", "x", "*")
    pairs = tuple((f"{a} {sign} {b}", str(a * b)) for sign in signs for a in numbers for b in numbers)
    questions = ("What is {s}", "How much is {s}", "Calculate {s}", "{s}", "Tell me {s}")
    return Relation("product", pairs, questions, "{s} is {o}.")


BY_NAME = _read(Path(__file__).with_name("facts.ini"))
RELATIONS: tuple[Relation, ...] = (*BY_NAME.values(), _products())
