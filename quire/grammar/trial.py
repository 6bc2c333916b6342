"""Follows some answers of a new grammar for a while, so that what soon becomes too costly is refused at once."""

from __future__ import annotations

import random
import time

import numpy as np

from quire.foundation.errors import InputError
from quire.grammar.base import CompiledGrammar, GrammarError
from quire.types.structured import FIELD

ANSWERS = 3
TOKENS = 40
SLOWEST_ROW = 0.1  # seconds of processor time


def rehearse(grammar: CompiledGrammar, vocab_size: int) -> None:
    """Raises InputError if the grammar's limits, or those of one row, are exceeded."""
    rng = random.Random(0)
    row = np.zeros(-(-vocab_size // 32), np.int32)
    for _ in range(ANSWERS):
        matcher = grammar.matcher()
        for _ in range(TOKENS):
            began = time.thread_time()
            try:
                matcher.fill(row)
            except GrammarError as error:
                raise InputError(f"the {grammar.spec.kind} is too complex: {error}", FIELD) from None
            if time.thread_time() - began > SLOWEST_ROW:
                raise InputError(
                    f"the {grammar.spec.kind} is too complex: telling what may come next took more than "
                    f"{SLOWEST_ROW * 1e3:.0f} ms",
                    FIELD,
                )
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if not len(allowed) or not matcher.accept(int(rng.choice(allowed))) or matcher.is_done:
                break
