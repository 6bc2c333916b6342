"""Grammars of a tiny vocabulary that follow from a number, and what a constraint means, without any state machine."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.types.structured import Constraint, GrammarSpec, Thinking

VOCAB = 23
EOS = 0
LONGEST = 6  # tokens of a sentence


def spec(number: int) -> GrammarSpec:
    return GrammarSpec("regex", str(number))


@dataclass(frozen=True)
class ToyGrammar:
    """Sentences of at most LONGEST tokens. All follows from `number`; 0: the empty sentence alone."""

    number: int

    def may_end(self, sentence: Sequence[int]) -> bool:
        return self.is_full(sentence) or random.Random(f"end {self.number} {sentence}").random() < 0.2

    def is_full(self, sentence: Sequence[int]) -> bool:
        return len(sentence) >= (1 + self.number % LONGEST if self.number else 0)

    def allows(self, sentence: Sequence[int]) -> set[int]:
        """The tokens that may come after `sentence`, the end included."""
        rng = random.Random(f"next {self.number} {sentence}")
        found = set() if self.is_full(sentence) else set(rng.sample(range(1, VOCAB), rng.randint(1, 5)))
        return found | ({EOS} if self.may_end(sentence) else set())


@dataclass
class ToyMatcher:
    grammar: ToyGrammar
    sentence: list[int] = field(default_factory=list)
    has_ended: bool = False

    def accept(self, token: int) -> bool:
        if self.has_ended or token not in self.grammar.allows(self.sentence):
            return False
        if token == EOS:
            self.has_ended = True
        else:
            self.sentence.append(token)
        return True

    @property
    def is_done(self) -> bool:
        return self.has_ended or self.grammar.is_full(self.sentence)

    def fill(self, row: np.ndarray) -> None:
        row[:] = 0
        for token in () if self.has_ended else self.grammar.allows(self.sentence):
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


class ToySource:
    """A MaskSource."""

    def __init__(self) -> None:
        self.closed: list[int] = []  # budgets that answers were closed with

    def fill(self, matchers: Sequence[ToyMatcher], rows: np.ndarray) -> None:
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill(row)

    def close_soon(self, matcher: ToyMatcher, budget: int, row: np.ndarray) -> None:
        self.closed.append(budget)
        matcher.fill(row)


def tokens_of(row: np.ndarray) -> set[int]:
    return {token for token in range(VOCAB) if row.view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1}


class Meaning(NamedTuple):
    """Of a constraint for an output."""

    allowed: set[int] | None  # tokens that may follow; None: any
    is_over: bool  # the grammar is complete
    outlives_stop: bool  # the last token, if it is a stop token, ended the thinking only


def meaning(constraint: Constraint, output: Sequence[int], stops: Collection[int] = ()) -> Meaning:
    """Told from the whole output at once."""
    has_grammar = constraint.grammar is not None
    part, tokens = _part(constraint, list(output))
    outlives = bool(output) and has_grammar and _part(constraint, list(output[:-1]))[0] == "thought"
    if part == "thought":
        assert constraint.thinking is not None
        was_stopped = has_grammar and not set(tokens).isdisjoint(stops)
        return Meaning(_in_thought(tokens, constraint.thinking, was_stopped), False, outlives)
    if constraint.grammar is None:
        return Meaning(None, False, False)
    grammar = ToyGrammar(int(constraint.grammar.text))
    if part == "start":
        assert constraint.thinking is not None
        return Meaning({constraint.thinking.start[len(tokens)]} | _after(grammar, tokens), False, False)
    return Meaning(_after(grammar, tokens), grammar.is_full(tokens) or tokens[-1:] == [EOS], outlives)


def _part(constraint: Constraint, output: list[int]) -> tuple[str, list[int]]:
    """Where the output has come to, "start" (of what may become a thinking), "thought" or "answer", and its tokens of
    that part."""
    thinking = constraint.thinking
    if thinking is None or (thinking.state == "maybe" and not thinking.start):
        return "answer", output
    start = [] if thinking.state == "open" else thinking.start
    if len(output) < len(start) and output == start[: len(output)]:
        return "start", output
    if output[: len(start)] != start:
        return "answer", output
    thought = output[len(start) :]
    end = next((e for e in range(len(thought) + 1) if _ends_with(thought[:e], thinking.end)), None)
    return ("thought", thought) if end is None else ("answer", thought[end:])


def _after(grammar: ToyGrammar, answer: list[int]) -> set[int]:
    """Nothing follows what is no beginning of a sentence."""
    begun = all(token != EOS and token in grammar.allows(answer[:i]) for i, token in enumerate(answer))
    return grammar.allows(answer) if begun else set()


def _in_thought(thought: list[int], thinking: Thinking, was_stopped: bool) -> set[int] | None:
    if not was_stopped and (thinking.max_tokens is None or len(thought) < thinking.max_tokens):
        return None
    matched = max(k for k in range(len(thinking.end)) if _ends_with(thought, thinking.end[:k]))
    return {thinking.end[matched]}


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return list(tokens[len(tokens) - len(end) :]) == list(end) if len(tokens) >= len(end) else False


def random_constraint(rng: random.Random) -> Constraint:
    """Any kind there is, over few tokens, so that markers come up by themselves."""
    thinking = None
    if rng.random() < 0.6:
        thinking = Thinking(
            end=[rng.randint(1, 3) for _ in range(rng.randint(1, 3))],
            start=[rng.randint(1, 3) for _ in range(rng.choice((0, 1, 1, 2)))],
            state=rng.choice(("open", "maybe")),
            max_tokens=rng.choice((None, 0, 1, 2, 3, 5)),
        )
    number = rng.randint(0, 40) if rng.random() < 0.1 else rng.randint(1, 40)
    has_grammar = thinking is None or rng.random() < 0.7
    return Constraint(spec(number) if has_grammar else None, thinking)
