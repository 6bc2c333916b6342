"""How an engine's lives follow each other: what is known of a death, and whether another start is worth it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.config.resolve import Resolved
from quire.engine.messages import EngineInfo
from quire.foundation.errors import EngineDeadError

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0  # seconds before a start that follows one which failed; each is twice the last


@dataclass(frozen=True, slots=True)
class Death:
    """What a client knows of how its engine ended.

    ids: of the requests in the step that raised, or in those under way; None: nobody said. was_killed: by somebody
    else. on_trial: the suspect that the engine let in last. lost: the requests that it had; None: all that are open.
    others: engines beside it that go on.
    """

    cause: str
    ids: frozenset[str] | None = None
    was_killed: bool = False
    on_trial: str | None = None
    lost: frozenset[str] | None = None
    others: int = 0


class Lives:
    """Counts deaths in a row in which nobody got a token. More than `most` are the end; 0: the first one is, served or
    not."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_barren = 0
        self._num_failed = 0  # starts in a row
        self.is_over = False

    def end(self, cause: str, *, served: bool) -> None:
        """A life has ended. Raises EngineDeadError if it was the last."""
        self._num_failed = 0
        self._num_barren = 0 if served else self._num_barren + 1
        self._judge(cause)

    def end_at_start(self, cause: str) -> float:
        """Like `end`, of one that did not even begin. Returns the seconds to wait before the next start."""
        self._num_barren += 1
        self._judge(f"it cannot be started again: {cause}")
        self._num_failed += 1
        return min(FIRST_PAUSE * 2.0 ** (self._num_failed - 1), LONGEST_PAUSE)

    def _judge(self, cause: str) -> None:
        if not self._most:
            self.is_over = True
            raise EngineDeadError(cause)
        if self._num_barren > self._most:
            self.is_over = True
            raise EngineDeadError(f"{cause} (death {self._num_barren} in a row in which nobody got a token)")


def with_room(resolved: Resolved, info: EngineInfo) -> Resolved:
    """Whoever the first engine let in must find as long a context in the next, or there is none."""
    return replace(resolved, max_model_len=info.max_model_len, max_model_len_is_explicit=True)
