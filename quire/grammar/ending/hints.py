"""What may close an answer under a grammar: short texts that it allows, found before the answer begins."""

from __future__ import annotations

import json
from itertools import islice

import msgspec

from quire.grammar.ending import shortest_texts as shortest_texts
from quire.grammar.vocabulary import Vocabulary
from quire.types.structured import GrammarSpec

MARGIN = 4  # tokens: what one free token can add to the way beyond the largest of the small values
MAX_VALUES = 2000  # of a schema that are looked at
MAX_HINTS = 200
MAX_HINT = 200  # characters


class Hints(msgspec.Struct, frozen=True):
    """texts: what may close a value of this grammar. growth: tokens that one free token can make the way longer."""

    texts: tuple[str, ...]
    growth: int
    are_whole: bool  # each text is an answer by itself
    longest: int | None = None  # tokens of the longest answer, if there is one


def hints_of(spec: GrammarSpec, vocabulary: Vocabulary) -> Hints:
    """spec: canonical. Some milliseconds for a large schema."""
    if spec.kind == "json_schema":
        texts = shortest_texts.values(json.loads(spec.text))
    elif spec.kind == "structural_tag":
        texts = shortest_texts.parts(json.loads(spec.text))
    elif spec.kind == "choice":
        texts = iter(json.loads(spec.text))
    else:
        texts = iter([shortest_texts.match_of(spec.text) or ""] if spec.kind == "regex" else [])
    known = list(dict.fromkeys(text for text in islice(texts, MAX_VALUES) if text))
    largest = max((len(vocabulary.encode(text)) or len(text) for text in known), default=MARGIN)
    # A key that is not needed, and the rest of what only the branch of a union that has this key needs.
    growth = 2 * largest
    kept = sorted((text for text in known if len(text) <= MAX_HINT), key=len)[:MAX_HINTS]
    longest = max(map(len, known)) if spec.kind == "choice" and largest <= MAX_HINT else None
    return Hints(tuple(kept), growth, spec.kind in ("regex", "choice"), longest)
