"""Grammars by llguidance: an Earley parser over lazily built lexers, so that nothing is made for the vocabulary.

It refuses what it cannot enforce, releases the GIL while it works, and counts its work against limits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from quire.foundation.errors import InputError
from quire.grammar import json_schema, tags, tags_lark
from quire.grammar.base import GrammarError, Matcher, Recipe
from quire.grammar.closing import MAX_WALK, Closer, Closing
from quire.grammar.hints import Hints, hints_of
from quire.grammar.numbers import DigitLimit, DigitTable
from quire.grammar.vocabulary import Vocabulary
from quire.types.structured import FIELD, GrammarSpec

MAX_THREADS = 8
JSON_SPACE = r"[ \n\r\t]{1,8}"
ESCAPES = 'nrbtf\\"'  # in strings; not \u, by which a further key could pass for one that the schema names
_CONTROLS = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")
_LIMITS = LLParserLimits(
    max_items_in_row=2500,  # four an optional property, of which json_schema lets 400 pass
    initial_lexer_fuel=4_000_000,
    step_lexer_fuel=400_000,  # about 30 ms: the worst that one row can hold a step up
    step_max_items=50_000,
    max_lexer_states=50_000,  # of 1 to 2 kB
    max_grammar_size=500_000,
    verbose_errors=False,
)


class _TokenTable:
    """What LLTokenizer reads: the bytes of all tokens, and how a text that is bound to come is usually tokenized."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.greedy: LLTokenizer | None = None
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted({*vocabulary.special.values(), *vocabulary.stop_ids})
        for name, token in vocabulary.special.items():
            self.tokens[token] = name.encode()
        for token in vocabulary.stop_ids:
            self.tokens[token] = self.tokens[token] or f"<|stop {token}|>".encode()
        self.eos_token_id = vocabulary.stop_ids[0]

    def __call__(self, text: str) -> list[int]:
        ids = self._vocabulary.encode(text)
        if not ids and self.greedy is not None:
            ids = self.greedy.greedy_tokenize(text)
        return ids


class LLGuidance:
    """The backend for one vocabulary. Building it takes about a microsecond a token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        table: Any = _TokenTable(vocabulary)
        self._tokenizer = LLTokenizer(table, n_vocab=vocabulary.size, eos_token=vocabulary.stop_ids)
        table.greedy = self._tokenizer
        self._digits = DigitTable(vocabulary.tokens)
        self._closer = Closer(vocabulary)
        self._executor = LLExecutor(min(MAX_THREADS, max(1, (os.cpu_count() or 1) // 2)))

    def compile(self, spec: GrammarSpec) -> LLGrammar:
        """Raises InputError."""
        return self.build(spec, self.recipe(spec))

    def recipe(self, spec: GrammarSpec) -> Recipe:
        """All that takes Python to compile. Raises InputError."""
        return Recipe(self._source(spec), hints_of(spec, self.vocabulary))

    def build(self, spec: GrammarSpec, recipe: Recipe) -> LLGrammar:
        """The rest, without the GIL. Raises InputError."""
        inner = LLMatcher(self._tokenizer, recipe.source, log_level=0, limits=_LIMITS)
        if inner.is_error():
            raise InputError(f"the {spec.kind} cannot be enforced: {_refusal(inner)}", FIELD)
        digits = DigitLimit(self._digits) if spec.kind in ("json_schema", "json_object") else None
        matcher = LLGuidanceMatcher(inner, digits, frozenset(self.vocabulary.stop_ids), recipe.hints)
        row = np.zeros(-(-self.vocabulary.size // 32), np.int32)
        try:
            matcher.fill(row)  # its tables are kept, so the first answer finds them made
        except GrammarError as error:
            raise InputError(f"the {spec.kind} cannot be enforced: {error}", FIELD) from None
        if not row.any():
            raise InputError(f"the {spec.kind} cannot be enforced: no answer satisfies it", FIELD)
        return LLGrammar(spec, matcher)

    def fill(self, matchers: Sequence[Matcher], rows: np.ndarray) -> None:
        """Rows of matchers that failed are left empty."""
        ours = [matcher for matcher in matchers if isinstance(matcher, LLGuidanceMatcher)]
        assert len(ours) == len(matchers)
        assert rows.dtype == np.int32
        assert rows.flags.c_contiguous
        running = [(matcher.inner, line) for line, matcher in enumerate(ours) if not matcher.has_ended]
        self._executor.unsafe_compute_mask_ptr(running, rows.ctypes.data, rows.strides[0], len(rows))
        for line, matcher in enumerate(ours):
            matcher.finish(rows[line])

    def _source(self, spec: GrammarSpec) -> str:
        """The grammar in llguidance's own form. Raises InputError."""
        if spec.kind == "regex":
            return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.text, tags_lark.ASCII_CLASSES)}/"))
        if spec.kind == "choice":
            options = (json.dumps(option, ensure_ascii=False) for option in json.loads(spec.text))
            return str(LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(options)))
        if spec.kind == "ebnf":
            return str(LLMatcher.grammar_from_lark(_lark(spec.text)))
        if spec.kind == "structural_tag":
            options_for = partial(_options_within, spec.whitespace)
            tag = json.loads(tags.plain(spec.text, FIELD))
            return tags_lark.translated(tag, self.vocabulary.special, self.vocabulary.stop_ids, options_for, _lark)
        text = json_schema.plain(spec.text, FIELD) if spec.kind == "json_schema" else '{"type":"object"}'
        return str(LLMatcher.grammar_from_json_schema(text, overrides=_json_options(spec.whitespace, text)))

    def way_to_end(self, matcher: Matcher) -> list[int] | None:
        """Tokens that complete the answer, not many; None if none are found."""
        assert isinstance(matcher, LLGuidanceMatcher)
        return self._closer.way(matcher, matcher.hints, MAX_WALK)

    def close_soon(self, matcher: Matcher, budget: int, row: np.ndarray) -> None:
        """See `GrammarService.close_soon`. Raises GrammarError."""
        assert isinstance(matcher, LLGuidanceMatcher)
        self._closer.fill(matcher.hints, matcher, matcher.closing, matcher.num_tokens, budget, row)


class LLGrammar:
    def __init__(self, spec: GrammarSpec, first: LLGuidanceMatcher) -> None:
        self.spec = spec
        self._first = first

    def matcher(self) -> LLGuidanceMatcher:
        return self._first.fork()


class LLGuidanceMatcher:
    __slots__ = ("_digits", "_stop_ids", "closing", "has_ended", "hints", "inner", "num_tokens")
    backend = "llguidance"

    def __init__(self, inner: Any, digits: DigitLimit | None, stop_ids: frozenset[int], hints: Hints) -> None:
        self.inner = inner
        self.hints = hints
        self.num_tokens = 0  # accepted, stop tokens aside
        self.closing = Closing()
        self.has_ended = False  # by a stop token
        self._digits = digits
        self._stop_ids = stop_ids

    def accept(self, token: int) -> bool:
        if self.has_ended:
            return False
        if token in self._stop_ids:
            self.has_ended = self.may_end
            return self.has_ended
        if self.inner.is_stopped() or self.inner.validate_tokens([token]) != 1:
            return False
        self.inner.consume_token(token)
        self.num_tokens += 1
        if self._digits is not None:
            self._digits.push(token)
        return True

    def fill(self, row: np.ndarray) -> None:
        assert row.dtype == np.int32
        assert row.flags.c_contiguous
        if not self.has_ended:
            self.inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.finish(row)
        if self.inner.is_error():
            raise GrammarError(f"the grammar cannot be followed any further: {_reason(self.inner)}")

    def finish(self, row: np.ndarray) -> None:
        """What is to be done once the library has filled a row."""
        if self.has_ended:
            row.fill(0)
            for token in self._stop_ids:
                row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        elif self.inner.is_error():
            row.fill(0)
        elif self._digits is not None:
            self._digits.cut(row)

    @property
    def may_end(self) -> bool:
        return not self.inner.is_error() and bool(self.inner.is_accepting())

    @property
    def is_done(self) -> bool:
        return self.has_ended or (self.may_end and bool(self.inner.is_stopped()))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self.has_ended:
            self.has_ended = False
            num_tokens -= 1
        if num_tokens:
            self.inner.rollback(num_tokens)
            self.num_tokens -= num_tokens
            self.closing = Closing()
            if self._digits is not None:
                self._digits.rollback(num_tokens)

    def fork(self) -> LLGuidanceMatcher:
        digits = self._digits and self._digits.fork()
        other = LLGuidanceMatcher(self.inner.deep_copy(), digits, self._stop_ids, self.hints)
        other.num_tokens = self.num_tokens
        other.has_ended = self.has_ended
        return other


def _json_options(whitespace: str, schema: str) -> Any:
    """How JSON is written. schema: its text. Raises InputError."""
    options: dict[str, Any] = {"json_allowed_escapes": ESCAPES}
    if _CONTROLS.search(schema):  # they can be written by \u alone
        if '"properties"' in schema:
            raise InputError("a JSON schema may not hold control characters beside named properties", FIELD)
        options = {}
    if whitespace == "none":
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": JSON_SPACE if whitespace == "bounded" else whitespace}


def _options_within(whitespace: str, max_whitespace: int | None, schema: Any) -> Any:
    text = json.dumps(schema, ensure_ascii=False)
    if max_whitespace in (None, -1):
        return _json_options(whitespace, text)
    return _json_options("none" if max_whitespace == 0 else rf"[ \n\r\t]{{1,{max_whitespace}}}", text)


def _lark(text: str) -> str:
    """Lark as it is, GBNF translated."""
    try:
        return str(any_to_lark(text))
    except Exception as error:
        raise InputError(f"grammar cannot be read: {error}", "grammar") from None


def _refusal(matcher: Any) -> str:
    reason = _reason(matcher)
    if "coerce_one_of" in reason:
        return (
            "its oneOf has branches that may hold of the same value; tell them apart by a required const, or use anyOf"
        )
    return reason


def _reason(matcher: Any) -> str:
    text = str(matcher.get_error()).partition("\n<state>")[0]
    return " ".join(text.split())[:400]
