"""A grammar service of toy grammars (tests/scheduling/toy_grammar.py). Texts: a number; "slow N" comes when it is let
go; "wrong" cannot be compiled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quire.foundation.errors import InputError
from quire.grammar.service import Compiled
from quire.types.structured import GrammarSpec
from tests.scheduling.toy_grammar import ToyGrammar, ToyMatcher, ToySource


class ToyCompiled:
    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec

    def matcher(self) -> ToyMatcher:
        return ToyMatcher(ToyGrammar(int(self.spec.text.split()[-1])))


class ToyService(ToySource):
    """`made` lists all there are."""

    made: list[ToyService] = []  # noqa: RUF012

    def __init__(self, folder: Path | None, vocab_size: int, stop_ids: Sequence[int], usual: str) -> None:
        super().__init__()
        self.arguments = folder, vocab_size, list(stop_ids), usual
        self.slow: list[Compiled] = []
        self._ready: list[Compiled] = []
        self._num_tickets = 0
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._awake, False)
        self.is_closed = False
        ToyService.made.append(self)

    def ask(self, spec: GrammarSpec) -> int:
        self._num_tickets += 1
        if spec.text == "wrong":
            answer = Compiled(self._num_tickets, error=InputError("this grammar is wrong", "regex"))
        else:
            answer = Compiled(self._num_tickets, ToyCompiled(spec))  # type: ignore[arg-type]
        if spec.text.startswith("slow"):
            self.slow.append(answer)
        else:
            self._tell([answer])
        return self._num_tickets

    def let_go(self, *, last: bool = False) -> None:
        """The slow grammar that was asked for first (or last) is compiled; from any thread."""
        self._tell([self.slow.pop(-1 if last else 0)])

    def _tell(self, answers: list[Compiled]) -> None:
        self._ready += answers
        os.write(self._wake, b"!")

    def poll(self) -> list[Compiled]:
        try:
            os.read(self._awake, 4096)
        except BlockingIOError:
            return []
        ready, self._ready = self._ready, []
        return ready

    def fileno(self) -> int:
        return self._awake

    def fill(self, matchers: Sequence[ToyMatcher], rows: np.ndarray) -> None:
        assert not self.is_closed
        super().fill(matchers, rows)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            os.close(self._awake)
            os.close(self._wake)
