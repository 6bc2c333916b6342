"""Grammars by llguidance: an Earley parser over lazily built lexers, so that nothing is made for the vocabulary.

It refuses what it cannot enforce, releases the GIL while it works, and counts its work against limits.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from quire.foundation.errors import InputError
from quire.grammar.base import GrammarError, Matcher, Recipe
from quire.grammar.canonical import canonical
from quire.grammar.ending.force_end import MAX_WALK, EndForcer, EndingState
from quire.grammar.ending.hints import Hints, hints_of
from quire.grammar.finite_numbers import DigitLimit, DigitTable
from quire.grammar.llguidance import lark_tags as tags_lark
from quire.grammar.llguidance.copies import MatcherCopies, MatcherCopy, usable_threads
from quire.grammar.llguidance.mask_cache import MaskCache, PlaceMasks
from quire.grammar.llguidance.regex_states import RegexState
from quire.grammar.vocabulary import Vocabulary
from quire.types.structured import FIELD, GrammarSpec

MAX_COPY_SECONDS = 0.05  # what takes longer to build is not built twice: it is large as well
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
    """The backend for one vocabulary. Building it takes about a microsecond a token.

    num_threads: that make masks, none of which is started before it has something to do; None: as many as are usable.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int | None = None) -> None:
        self.vocabulary = vocabulary
        self.num_threads = num_threads or usable_threads()
        table: Any = _TokenTable(vocabulary)
        self._tokenizer = LLTokenizer(table, n_vocab=vocabulary.size, eos_token=vocabulary.stop_ids)
        table.greedy = self._tokenizer
        self._digits = DigitTable(vocabulary.tokens)
        self._end_forcer = EndForcer(vocabulary)
        self._masks = MaskCache()
        self._executor: LLExecutor | None = None
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="grammar-copies")

    def compile(self, spec: GrammarSpec) -> LLGrammar:
        """Raises InputError."""
        return self.build(spec, self.recipe(spec))

    def recipe(self, spec: GrammarSpec) -> Recipe:
        """All that takes Python to compile. Raises InputError."""
        spec = canonical(spec)
        return Recipe(self._source(spec), hints_of(spec, self.vocabulary))

    def build(self, spec: GrammarSpec, recipe: Recipe) -> LLGrammar:
        """The rest, without the GIL. Raises InputError."""

        def make(row: np.ndarray) -> LLMatcher:
            """With the tables that every answer needs, which the first mask leaves behind."""
            matcher = LLMatcher(self._tokenizer, recipe.source, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            return matcher

        row = np.zeros(-(-self.vocabulary.size // 32), np.int32)
        began = time.thread_time()
        first = make(row)
        is_small = time.thread_time() - began < MAX_COPY_SECONDS
        if first.is_error():
            raise InputError(f"the {spec.kind} cannot be enforced: {_refusal(first)}", FIELD)
        digits = DigitLimit(self._digits) if spec.kind in ("json_schema", "json_object") else None
        if digits is not None:
            digits.cut(row)
        if not row.any():
            raise InputError(f"the {spec.kind} cannot be enforced: no answer satisfies it", FIELD)
        again = (lambda: make(np.empty_like(row))) if is_small else None
        copies = MatcherCopies(first, again, self.num_threads, self._builder)
        kept = PlaceMasks(spec.text, self.vocabulary.tokens, self._masks) if spec.kind == "regex" else None
        return LLGrammar(spec, copies, row, digits, kept, frozenset(self.vocabulary.stop_ids), recipe.hints)

    def fill(self, matchers: Sequence[Matcher], rows: np.ndarray) -> None:
        """Rows of matchers that failed are left empty."""
        assert rows.dtype == np.int32
        assert rows.flags.c_contiguous
        left: list[tuple[LLGuidanceMatcher, int]] = []
        same: list[tuple[LLGuidanceMatcher, int, int]] = []  # and the place in `left` of one who is where it is
        seen: dict[tuple[LLGrammar, RegexState], int] = {}
        for line, matcher in enumerate(matchers):
            assert isinstance(matcher, LLGuidanceMatcher)
            if matcher.fill_at_once(rows[line]):
                continue
            if matcher.place is not None:
                first = seen.setdefault((matcher.grammar, matcher.place), len(left))
                if first < len(left):
                    same.append((matcher, line, first))
                    continue
            left.append((matcher, line))
        self._compute(left, rows)
        for matcher, line in left:
            matcher.finish(rows[line])
        for matcher, line, first in same:
            if not left[first][0].inner.is_error():
                rows[line] = rows[left[first][1]]
            elif not matcher.fill_at_once(rows[line]):
                self._compute([(matcher, line)], rows)
                matcher.finish(rows[line])

    def _compute(self, left: list[tuple[LLGuidanceMatcher, int]], rows: np.ndarray) -> None:
        """Let the library fill these lines of `rows`, those of different copies at the same time."""
        address, stride = rows.ctypes.data, rows.strides[0]
        if len({id(matcher.shared) for matcher, _ in left}) <= 1 or self.num_threads == 1:
            for matcher, line in left:
                matcher.inner.unsafe_compute_mask_ptr(address + line * stride, stride)
            return
        if self._executor is None:
            self._executor = LLExecutor(self.num_threads)
        # Threads get pieces of the list, and should not meet at one copy.
        work = [(matcher.inner, line) for matcher, line in sorted(left, key=lambda each: id(each[0].shared))]
        self._executor.unsafe_compute_mask_ptr(work, address, stride, len(rows))

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
            tag = json.loads(spec.text)
            return tags_lark.translated(tag, self.vocabulary.special, self.vocabulary.stop_ids, options_for, _lark)
        text = spec.text if spec.kind == "json_schema" else '{"type":"object"}'
        return str(LLMatcher.grammar_from_json_schema(text, overrides=_json_options(spec.whitespace, text)))

    def way_to_end(self, matcher: Matcher) -> list[int] | None:
        """Tokens that complete the answer, not many; None if none are found."""
        assert isinstance(matcher, LLGuidanceMatcher)
        return self._end_forcer.way(matcher, matcher.hints, MAX_WALK)

    def close_soon(self, matcher: Matcher, budget: int, row: np.ndarray) -> None:
        """See `GrammarService.close_soon`. Raises GrammarError."""
        assert isinstance(matcher, LLGuidanceMatcher)
        self._end_forcer.fill(matcher.hints, matcher, matcher.ending_state, matcher.num_tokens, budget, row)


class LLGrammar:
    """first_row: what every answer may begin with; digits: at the beginning, None if numbers are not limited; kept:
    masks that are kept, if any are."""

    def __init__(
        self,
        spec: GrammarSpec,
        copies: MatcherCopies,
        first_row: np.ndarray,
        digits: DigitLimit | None,
        kept: PlaceMasks | None,
        stop_ids: frozenset[int],
        hints: Hints,
    ) -> None:
        self.spec = spec
        self.kept = kept
        self.copies = copies
        self.first_row = first_row
        self.stop_ids = stop_ids
        self.hints = hints
        self._digits = digits

    def matcher(self) -> LLGuidanceMatcher:
        matcher = LLGuidanceMatcher(self, None, self._digits and self._digits.fork())
        self.copies.expect(matcher)
        return matcher


class LLGuidanceMatcher:
    """shared: the copy where it began, None before its first token; then `inner` is its own.

    place: where it is in its regex, if that is known.
    """

    backend = "llguidance"
    __slots__ = (
        "__weakref__",
        "_digits",
        "ending_state",
        "grammar",
        "has_ended",
        "inner",
        "num_tokens",
        "place",
        "shared",
    )

    def __init__(self, grammar: LLGrammar, shared: MatcherCopy | None, digits: DigitLimit | None) -> None:
        self.shared = shared
        self.inner = grammar.copies.first
        self.num_tokens = 0  # accepted, stop tokens aside
        self.ending_state = EndingState()
        self.has_ended = False  # by a stop token
        self.place = None if grammar.kept is None else grammar.kept.start
        self.grammar = grammar
        self._digits = digits

    @property
    def hints(self) -> Hints:
        return self.grammar.hints

    def accept(self, token: int) -> bool:
        if self.has_ended:
            return False
        if token in self.grammar.stop_ids:
            self.has_ended = self.may_end
            return self.has_ended
        if self.shared is None:
            self.shared = self.grammar.copies.take(self)
            self.inner = self.shared.matcher.deep_copy()
        if self.inner.try_consume_tokens([token]) != 1:
            return False
        self.num_tokens += 1
        if self._digits is not None:
            self._digits.push(token)
        if self.place is not None and self.grammar.kept is not None:
            self.place = self.grammar.kept.after(self.place, token)
        return True

    def fill(self, row: np.ndarray) -> None:
        assert row.dtype == np.int32
        assert row.flags.c_contiguous
        if not self.fill_at_once(row):
            self.inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self.finish(row)
        if self.inner.is_error():
            raise GrammarError(f"the grammar cannot be followed any further: {_reason(self.inner)}")

    def fill_at_once(self, row: np.ndarray) -> bool:
        """Fill it if that takes no computation."""
        if self.has_ended:
            row.fill(0)
            for token in self.grammar.stop_ids:
                row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        elif self.shared is None:
            row[:] = self.grammar.first_row
        elif (known := self._known_row()) is not None:
            row[:] = known
        else:
            return False
        return True

    def _known_row(self) -> np.ndarray | None:
        kept = self.grammar.kept
        return None if kept is None or self.place is None else kept.get(self.place)

    def finish(self, row: np.ndarray) -> None:
        """What is to be done once the library has filled a row."""
        if self.inner.is_error():
            row.fill(0)
            if self.shared is not None:
                self.grammar.copies.replace(self.shared)
        elif self._digits is not None:
            self._digits.cut(row)
        elif self.place is not None and self.grammar.kept is not None:
            self.grammar.kept.put(self.place, row, self.inner)

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
            self.ending_state = EndingState()
            self.place = None
            if self._digits is not None:
                self._digits.rollback(num_tokens)

    def fork(self) -> LLGuidanceMatcher:
        other = LLGuidanceMatcher(self.grammar, self.shared, self._digits and self._digits.fork())
        if self.shared is not None:
            other.inner = self.inner.deep_copy()
            self.shared.answers.add(other)
        other.num_tokens = self.num_tokens
        other.place = self.place
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
        raise InputError(f"grammar cannot be read: {error}", FIELD) from None


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
