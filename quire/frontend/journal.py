"""The requests that are open, and what an engine would have to know to go on with them if the one that has them dies.

Kept in memory until each has ended: the request itself, the list of its tokens that its answer grows anyway, and five
words. Nothing is done for a token.

Who killed an engine is found out like this. One death proves nothing: all come back at once. A request that got no
token between two deaths is a suspect, and the next engine lets suspects in one by one: who gets a token is none any
more. If the engine dies of itself while a suspect is on trial, that was the reason. If it was killed, by an operator or
for want of memory, it takes a few times, and the others come first meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from quire.engine.client import EngineClient
from quire.engine.lives import Death
from quire.foundation.errors import EngineDeadError
from quire.foundation.log import get_logger
from quire.types.output import STEP_FAILED, EngineOutput
from quire.types.request import EngineRequest

MAX_DEATHS = 2  # with so many engines in a row, without a token between, a request is a suspect
MAX_TRIALS = 3  # so many times an engine must have been killed, while a suspect was on trial, to end it
SENT_AT_ONCE = 64  # requests
_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Entry:
    """token_ids: of the answer, as far as it is known here. It grows."""

    request: EngineRequest
    token_ids: list[int]
    is_sent: bool = False  # to the engine that runs now
    num_given: int = 0  # tokens that were known when it was sent
    num_deaths: int = 0  # in a row, without a token between
    num_trials: int = 0  # deaths while it was on trial, in a row as well

    @property
    def is_suspect(self) -> bool:
        return self.num_deaths >= MAX_DEATHS


class Journal:
    """Of one client."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}  # by the engine's ids, in the order in which they came

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, request: EngineRequest, token_ids: list[int]) -> None:
        self._entries[request.id] = Entry(request, token_ids)

    def close(self, request_id: str) -> None:
        """It has ended. Unknown ids are ignored."""
        self._entries.pop(request_id, None)

    def send(self, client: EngineClient, request: EngineRequest) -> None:
        """For the first time. If the engine is dead and another will take its place, that will get it.

        Raises EngineDeadError if there is no engine any more.
        """
        try:
            client.add(request)
        except EngineDeadError:
            if not client.can_restart:
                raise
            return
        if (entry := self._entries.get(request.id)) is not None:
            entry.is_sent = True

    def unsent(self) -> list[Entry]:
        """What the engine that runs now lacks, some of it: call again until nothing is left."""
        found = [entry for entry in self._entries.values() if not entry.is_sent]
        return sorted(found, key=lambda entry: entry.num_trials)[:SENT_AT_ONCE]

    def send_again(self, client: EngineClient, entries: Iterable[Entry]) -> None:
        """Give to a new engine what of `unsent` is still open, with the answers so far.

        Raises EngineDeadError if this one has died as well.
        """
        for entry in entries:
            if entry.request.id in self._entries:
                request = msgspec.structs.replace(entry.request, given=list(entry.token_ids))
                client.add(request, again=True, suspect=entry.is_suspect)
                entry.is_sent, entry.num_given = True, len(entry.token_ids)

    def bury(self, death: Death) -> list[EngineOutput]:
        """The engine is dead. Returns the ends of those requests that killed it; the others wait for the next."""
        ends = []
        for entry in self._entries.values():
            if death.lost is not None and entry.request.id not in death.lost:
                continue
            if entry.is_sent and self._is_guilty(entry, death):
                ends.append(_end(entry, death))
            entry.is_sent = False
        return ends

    @staticmethod
    def _is_guilty(entry: Entry, death: Death) -> bool:
        request_id = entry.request.id
        has_advanced = len(entry.token_ids) > entry.num_given
        if has_advanced:
            entry.num_deaths = entry.num_trials = 0
        if death.ids is not None and request_id not in death.ids:
            return False
        entry.num_deaths += 1
        if request_id != death.on_trial or has_advanced:
            return False
        entry.num_trials += 1
        return not death.was_killed or entry.num_trials >= MAX_TRIALS


def log_death(death: Death, num_open: int) -> None:
    """num_open: requests that are open."""
    if death.others:
        _log.error("%s; its %d requests go on in %d others", death.cause, len(death.lost or ()), death.others)
    else:
        _log.error("the engine died: %s; %d requests wait for the next", death.cause, num_open)


def _end(entry: Entry, death: Death) -> EngineOutput:
    return EngineOutput(
        request_id=entry.request.id,
        finish_reason="error",
        stop_reason=STEP_FAILED,
        error=f"the engine died {entry.num_deaths} times in a row while it computed this request, the last time alone "
        f"under suspicion: {death.cause}",
    )
