"""Grammars by xgrammar: pushdown automata whose masks are largely made beforehand, for the whole vocabulary.

The library imports torch and transformers. So this file is imported only when a request or the server's option chooses
the backend: by name, in the core's process and in a sandbox of its own. It writes masks into numpy rows and releases
the GIL while it compiles and fills.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xgrammar

from quire.foundation.errors import InputError
from quire.grammar.base import GrammarError, Matcher, Recipe
from quire.grammar.canonical import canonical
from quire.grammar.ending.force_end import MAX_WALK, EndForcer, EndingState
from quire.grammar.ending.hints import Hints, hints_of
from quire.grammar.finite_numbers import DigitLimit, DigitTable
from quire.grammar.vocabulary import Vocabulary
from quire.grammar.xgrammar.regex import rewritten
from quire.grammar.xgrammar.schema import narrowed
from quire.grammar.xgrammar.tags import MAX_WHITESPACE, translated
from quire.types.structured import FIELD, GrammarSpec

MAX_THREADS = 8
SLOWEST_ROW = 0.25  # seconds of processor time: the library does not count its work, so a row that took longer ends it
_PLACE = re.compile(r"^\[[0-9:]+\] \S+:\d+: ")  # time and place in the library's messages


class XGrammar:
    """The backend for one vocabulary. Building it takes about a microsecond a token, and the import some seconds."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        info = xgrammar.TokenizerInfo(
            vocabulary.tokens,  # those without a spelling are special to the library, and never allowed
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=vocabulary.stop_ids,
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._digits = DigitTable(vocabulary.tokens)
        self._end_forcer = EndForcer(vocabulary)
        self._num_threads = min(MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))
        self._batch: Any = None

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar:
        """Raises InputError."""
        return self.build(spec, self.recipe(spec))

    def recipe(self, spec: GrammarSpec) -> Recipe:
        """All that takes Python to compile. Raises InputError."""
        spec = canonical(spec)
        return Recipe(self._source(spec), hints_of(spec, self.vocabulary))

    def build(self, spec: GrammarSpec, recipe: Recipe) -> XGrammarGrammar:
        """The rest, without the GIL. Raises InputError.

        Compiled anew from what the sandbox has compiled: serialising the tables and reading them took twice as long.
        """
        try:
            compiled = self._compile(spec, recipe.source)
        except (RuntimeError, ValueError) as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            raise InputError(f"the {spec.kind} cannot be enforced: {_reason(error)}", FIELD) from None
        digits = DigitLimit(self._digits) if spec.kind in ("json_schema", "json_object") else None
        inner = xgrammar.GrammarMatcher(compiled)
        first = XGrammarMatcher(inner, digits, frozenset(self.vocabulary.stop_ids), recipe.hints)
        row = np.zeros(-(-self.vocabulary.size // 32), np.int32)
        first.fill(row)
        if not row.any():
            raise InputError(f"the {spec.kind} cannot be enforced: no answer satisfies it", FIELD)
        return XGrammarGrammar(spec, first)

    def fill(self, matchers: Sequence[Matcher], rows: np.ndarray) -> None:
        """Rows of matchers that failed are left empty."""
        ours = [matcher for matcher in matchers if isinstance(matcher, XGrammarMatcher)]
        assert len(ours) == len(matchers)
        running = [line for line, matcher in enumerate(ours) if matcher.is_running]
        if running:
            if self._batch is None:  # its threads are not for a process that forks
                self._batch = xgrammar.BatchGrammarMatcher(self._num_threads)
            inner = [ours[line].inner for line in running]
            self._batch.batch_fill_next_token_bitmask(inner, rows, running)
        for matcher, row in zip(ours, rows, strict=True):
            matcher.finish(row)

    def way_to_end(self, matcher: Matcher) -> list[int] | None:
        """Tokens that complete the answer, not many; None if none are found."""
        assert isinstance(matcher, XGrammarMatcher)
        return self._end_forcer.way(matcher, matcher.hints, MAX_WALK)

    def close_soon(self, matcher: Matcher, budget: int, row: np.ndarray) -> None:
        """See `GrammarService.close_soon`. Raises GrammarError."""
        assert isinstance(matcher, XGrammarMatcher)
        self._end_forcer.fill(matcher.hints, matcher, matcher.ending_state, matcher.num_tokens, budget, row)

    def _source(self, spec: GrammarSpec) -> str:
        """What the library compiles, checked to hold nothing that it would leave out. Raises InputError."""
        if spec.kind == "regex":
            return rewritten(spec.text, f"{FIELD}: the regex", within_json=False)
        if spec.kind == "ebnf":
            return spec.text
        if spec.whitespace != "bounded":
            name = "disable_any_whitespace" if spec.whitespace == "none" else "whitespace_pattern"
            raise InputError(f"{name} is not supported by the backend xgrammar; use llguidance", FIELD)
        if spec.kind == "choice":
            options = [{"type": "const_string", "value": option} for option in json.loads(spec.text)]
            return json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": options}})
        if spec.kind == "structural_tag":
            return json.dumps(translated(json.loads(spec.text), self.vocabulary.special))
        schema = json.loads(spec.text) if spec.kind == "json_schema" else {"type": "object"}
        return json.dumps(narrowed(schema), ensure_ascii=False)

    def _compile(self, spec: GrammarSpec, source: str) -> Any:
        if spec.kind == "regex":
            return self._compiler.compile_regex(source)
        if spec.kind in ("choice", "structural_tag"):
            return self._compiler.compile_structural_tag(source)
        if spec.kind == "ebnf":
            compile_: Callable[[str], Any] = self._compiler.compile_grammar
            return (compile_ if "::=" in source else self._compiler.compile_lark)(source)
        return self._compiler.compile_json_schema(source, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)


class XGrammarGrammar:
    def __init__(self, spec: GrammarSpec, first: XGrammarMatcher) -> None:
        self.spec = spec
        self._first = first

    def matcher(self) -> XGrammarMatcher:
        return self._first.fork()


class XGrammarMatcher:
    __slots__ = (
        *("_digits", "_has_failed", "_is_done", "_stop_ids", "_width"),
        *("ending_state", "has_ended", "hints", "inner", "num_tokens"),
    )
    backend = "xgrammar"

    def __init__(self, inner: Any, digits: DigitLimit | None, stop_ids: frozenset[int], hints: Hints) -> None:
        self.inner = inner
        self.hints = hints
        self.num_tokens = 0  # accepted, stop tokens aside
        self.ending_state = EndingState()
        self.has_ended = False  # by a stop token
        self._has_failed = False
        self._is_done: bool | None = False  # None: not known yet
        self._digits = digits
        self._stop_ids = stop_ids
        self._width = 0  # of a row

    @property
    def is_running(self) -> bool:
        return not self.has_ended and not self._has_failed

    def accept(self, token: int) -> bool:
        if self.has_ended:
            return False
        if token in self._stop_ids:
            self.has_ended = self.may_end
            return self.has_ended
        if self._has_failed or self._is_done or not self.inner.accept_token(token):
            return False
        self._is_done = None
        self.num_tokens += 1
        if self._digits is not None:
            self._digits.push(token)
        return True

    def fill(self, row: np.ndarray) -> None:
        assert row.dtype == np.int32
        assert row.flags.c_contiguous
        if self.is_running:
            began = time.thread_time()
            self.inner.fill_next_token_bitmask(row)
            self._has_failed = time.thread_time() - began > SLOWEST_ROW
        self.finish(row)
        if self._has_failed:
            raise GrammarError("the grammar cannot be followed any further: it takes too long to say what may come")

    def finish(self, row: np.ndarray) -> None:
        """What is to be done once the library has filled a row."""
        self._width = len(row)
        if self.has_ended:
            row[:] = self._stops()
        elif self._has_failed:
            row.fill(0)
        elif self._digits is not None:
            self._digits.cut(row)

    def _stops(self) -> np.ndarray:
        row = np.zeros(self._width, np.int32)
        for token in self._stop_ids:
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        return row

    @property
    def may_end(self) -> bool:
        return not self._has_failed and bool(self.inner.is_completed())

    @property
    def is_done(self) -> bool:
        if self.has_ended:
            return True
        if self._is_done is None:
            self._is_done = self.may_end and self._only_stops()
        return self._is_done

    def _only_stops(self) -> bool:
        row = np.zeros(self._width, np.int32)
        self.inner.fill_next_token_bitmask(row)
        return not (row & ~self._stops()).any()

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self.has_ended:
            self.has_ended = False
            num_tokens -= 1
        if num_tokens:
            self.inner.rollback(num_tokens)
            self._is_done = None
            self.num_tokens -= num_tokens
            self.ending_state = EndingState()
            if self._digits is not None:
                self._digits.rollback(num_tokens)

    def fork(self) -> XGrammarMatcher:
        digits = self._digits and self._digits.fork()
        other = XGrammarMatcher(self.inner.fork(), digits, self._stop_ids, self.hints)
        other.num_tokens = self.num_tokens
        other.has_ended = self.has_ended
        other._has_failed, other._is_done, other._width = self._has_failed, self._is_done, self._width
        return other


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return _PLACE.sub("", lines[-1])[:400] if lines else type(error).__name__
