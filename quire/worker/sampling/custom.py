"""Runs the users' logits processors over the rows that want them, and keeps their errors to these."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.config.logits_processors import processor_classes
from quire.foundation.errors import ConfigError
from quire.foundation.log import get_logger
from quire.kernels.sampling.sampling import History
from quire.platforms.transfers import upload
from quire.types.plan import Admit
from quire.worker.sampling.plugins import LogitsProcessor, ProcessorSetup, Row, Rows

_log = get_logger(__name__)


def make_processors(names: Sequence[str], setup: ProcessorSetup) -> list[LogitsProcessor]:
    """Raises ConfigError for a name without a class and a class that cannot be made."""
    made = []
    for name, found in zip(names, processor_classes(names), strict=True):
        if _overrides(found, "apply") == _overrides(found, "apply_row"):
            raise ConfigError(
                f"logits_processors: {name!r} must override one of apply and apply_row", "logits_processors"
            )
        try:
            made.append(found(setup))
        except Exception as error:
            raise ConfigError(
                f"logits_processors: {name!r} cannot be made: {_told(error)}", "logits_processors"
            ) from error
    return made


def _overrides(found: type, method: str) -> bool:
    return getattr(found, method, None) is not getattr(LogitsProcessor, method)


class CustomProcessors:
    """The processors of an engine, and a row a seat and processor.

    num_computed: of each seat, the tokens whose KV is there once the step in hand is computed (`Seats`).
    """

    def __init__(self, processors: Sequence[LogitsProcessor], num_computed: np.ndarray) -> None:
        self._processors = processors
        self._num_computed = num_computed
        self._rows: list[dict[int, Row]] = [{} for _ in processors]  # by seat
        self._failures: dict[int, str] = {}  # by seat, until it has a row that tells

    def admit(self, admits: Sequence[Admit]) -> list[int]:
        """Make the states of newly seated requests. Returns the seats that want a processor."""
        wanting = set()
        for admit in admits:
            self._forget(admit.seat)
            for processor, rows in zip(self._processors, self._rows, strict=True):
                try:
                    if admit.params.is_greedy and processor.is_argmax_invariant():
                        continue
                    state = processor.admit(admit.params)
                except Exception as error:
                    self._fail(processor, [admit.seat], error)
                    break
                if state is not None:
                    rows[admit.seat] = Row(admit.params, state, admit.seat, admit.num_prompt)
                    wanting.add(admit.seat)
        return sorted(wanting)

    def apply(self, logits: torch.Tensor, seats: np.ndarray, history: History) -> None:
        """Edit float32 logits [rows, vocab] of these seats, in place."""
        counts = self._num_computed[seats].tolist()
        for processor, by_seat in zip(self._processors, self._rows, strict=True):
            places = [place for place, seat in enumerate(seats.tolist()) if seat in by_seat]
            if places:
                rows = Rows(
                    (by_seat[int(seats[place])] for place in places),
                    (counts[place] for place in places),
                    history,
                    logits.device,
                )
                self._apply(processor, logits, places, rows)

    def _apply(self, processor: LogitsProcessor, logits: torch.Tensor, places: list[int], rows: Rows) -> None:
        if _overrides(type(processor), "apply_row"):
            for place, row in zip(places, rows, strict=True):
                try:
                    _write_back(processor.apply_row(logits[place], row), logits[place])
                except Exception as error:
                    self._fail(processor, [row.seat], error)
                    logits[place].zero_()
            return
        all_rows = len(places) == len(logits)
        index = None if all_rows else upload(torch.tensor(places), logits.device)
        part = logits if index is None else logits.index_select(0, index)
        try:
            _write_back(processor.apply(part, rows), part)
        except Exception as error:
            self._fail(processor, [row.seat for row in rows], error)
            part.zero_()
        if index is not None:
            logits.index_copy_(0, index, part)

    def take_failures(self, seats: np.ndarray) -> dict[int, str]:
        """What went wrong with these, by seat. A seat that fails when it is admitted may have no row yet."""
        if not self._failures:
            return {}
        return {seat: self._failures.pop(seat) for seat in seats.tolist() if seat in self._failures}

    def _forget(self, seat: int) -> None:
        self._failures.pop(seat, None)
        for by_seat in self._rows:
            by_seat.pop(seat, None)

    def _fail(self, processor: LogitsProcessor, seats: Sequence[int], error: Exception) -> None:
        _log.error("logits processor %s failed for %d requests", type(processor).__name__, len(seats), exc_info=error)
        message = f"the logits processor {type(processor).__name__} failed: {_told(error)}"
        for seat in seats:
            self._forget(seat)  # a step may follow before the request is ended
            self._failures[seat] = message


def _write_back(returned: torch.Tensor | None, logits: torch.Tensor) -> None:
    """Of a processor that returns its edit instead of making it in place."""
    if returned is None or returned is logits:
        return
    if not isinstance(returned, torch.Tensor) or returned.shape != logits.shape:
        raise TypeError("it must edit the logits in place, or return a tensor of the same shape")
    logits.copy_(returned)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
