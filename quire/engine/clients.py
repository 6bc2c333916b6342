"""Several clients of one core: who asked for what, and whose news is whose.

The process that started the core is its client. Others join and leave at its word, each over sockets of its own: what a
step has to tell one of them is one message, whatever the number of its requests, and nothing goes through a third
process. The core itself knows nothing of this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.engine.messages import (
    Abort,
    Aborted,
    Add,
    FromCore,
    FromParent,
    Join,
    Leave,
    News,
    Ready,
    StartCore,
    StopCore,
    Suspects,
    ToCore,
    Trial,
    UtilityCall,
    UtilityReply,
)
from quire.foundation.child import Failure, Parent
from quire.foundation.log import get_logger
from quire.foundation.wire import Channel, WireError
from quire.types.output import INVALID_REQUEST, EngineOutput, EngineOutputs, EngineStats

PARENT = -1  # number of the client that started the core
Pick = Callable[[Sequence[Any]], Sequence[Any]]
_log = get_logger(__name__)


class Link:
    """One client as the core sees it."""

    def __init__(self, channel: Channel[Any]) -> None:
        self.channel = channel
        self._ids: list[str] | None = None  # that the client knows: of the latest message that had any

    def send(self, message: FromCore) -> None:
        self.channel.send(message)

    def tell(self, outputs: EngineOutputs) -> None:
        """News, without the ids if the client knows them."""
        if outputs.ids:
            if outputs.ids is self._ids:
                outputs = msgspec.structs.replace(outputs, ids=None)
            else:
                self._ids = outputs.ids
        self.channel.send(News(outputs))


class Clients:
    """The Inbox of a core in its own process, and the way back.

    What belongs to nobody else is the parent's.
    """

    def __init__(self, parent: Parent[FromParent]) -> None:
        self.stop_came = False
        self._links = {PARENT: Link(parent.channel)}
        self._owners: dict[str, int] = {}  # of the unfinished requests of those who joined
        self._aborts: deque[tuple[int, list[str]]] = deque()  # that the core has not confirmed
        self._calls: dict[int, tuple[int, int]] = {}  # number of a call here → client and its own number
        self._num_calls = 0
        self._shares = Shares(self._owners)

    # -- in ------------------------------------------------------------------------------------------------------

    def drain(self) -> list[ToCore]:
        messages: list[ToCore] = []
        for client in list(self._links):
            while client in self._links:
                try:
                    message = self._links[client].channel.receive()
                except WireError as error:
                    self._answer_unreadable(client, error)
                    continue
                if message is None:
                    break
                messages += self._take(client, message)
        return messages

    def wait(self, timeout: float | None, *sentinels: int) -> None:
        Channel.wait_any([link.channel for link in self._links.values()], timeout, *sentinels)

    def _take(self, client: int, message: FromParent) -> Iterable[ToCore]:
        """What the core is to do about it."""
        match message:
            case Join(number, folder):
                self._links[number] = Link(Channel(Path(folder), ToCore, parent=False))
                return ()
            case Leave(number):
                return self._leave(number)
            case StartCore():
                return ()
            case Add(request) if client != PARENT:
                if request.id in self._owners:
                    self._refuse(client, request.id, f"request id {request.id!r} is in use")
                    return ()
                self._owners[request.id] = client
            case Abort(ids, reason):
                self._aborts.append((client, ids))
                return (Abort([i for i in ids if self._owners.get(i, PARENT) == client], reason),)
            case UtilityCall(number, method, args):
                self._num_calls += 1
                self._calls[self._num_calls] = client, number
                return (UtilityCall(self._num_calls, method, args),)
            case StopCore():
                self.stop_came = True
        return (message,)

    def _leave(self, client: int) -> Iterable[ToCore]:
        link = self._links.pop(client, None)
        if link is None:
            return ()
        link.channel.close()
        theirs = [request_id for request_id, owner in self._owners.items() if owner == client]
        self._aborts.append((client, theirs))
        return (Abort(theirs),)

    def _answer_unreadable(self, client: int, error: WireError) -> None:
        """A request of wrong types ends with an error of its own, if its id can be found; nothing else suffers."""
        _log.error("a message was dropped: %s", error)
        try:
            request_id = str(msgspec.msgpack.decode(error.body)["request"]["id"])
        except (msgspec.DecodeError, LookupError, TypeError, ValueError):
            return
        self._refuse(client, request_id, str(error))

    def _refuse(self, client: int, request_id: str, message: str) -> None:
        output = EngineOutput(request_id=request_id, finish_reason="error", stop_reason=INVALID_REQUEST, error=message)
        self._links[client].send(News(EngineOutputs(special=[output])))

    # -- out -----------------------------------------------------------------------------------------------------

    def send(self, messages: Iterable[FromCore]) -> None:
        for message in messages:
            match message:
                case News(outputs):
                    self._tell(outputs)
                case Aborted(known):
                    client, ids = self._aborts.popleft()
                    for request_id in known:
                        self._owners.pop(request_id, None)
                    self._send(client, Aborted(ids))
                case UtilityReply(number, value, failure):
                    client, number = self._calls.pop(number)
                    self._send(client, UtilityReply(number, value, failure))
                case Ready():
                    self._send(PARENT, message)
                case Trial(request_id):
                    self._send(self._owners.get(request_id, PARENT), message)
                case Suspects() | Failure():
                    for link in self._links.values():
                        link.send(message)

    def close(self, linger: float) -> None:
        """Waits up to `linger` seconds for the last messages to leave."""
        deadline = time.monotonic() + linger
        for link in self._links.values():
            link.channel.close(max(0.0, deadline - time.monotonic()))

    def _send(self, client: int, message: FromCore) -> None:
        if client in self._links:
            self._links[client].send(message)

    def _tell(self, outputs: EngineOutputs) -> None:
        if len(self._links) == 1:
            self._links[PARENT].tell(outputs)
            return
        shares = self._shares.split(outputs)
        if outputs.stats is not None:
            self._add_stats(shares, outputs.stats)
        for client, share in shares.items():
            if client in self._links:
                self._links[client].tell(share)
        for output in outputs.special:
            if output.finish_reason is not None:
                self._owners.pop(output.request_id, None)

    def _add_stats(self, shares: dict[int, EngineOutputs], stats: EngineStats) -> None:
        """All of them hear of all; only the first, before the parent, hears of the steps, which must count once."""
        for client in sorted(self._links, key=lambda client: client == PARENT):
            share = shares.get(client, EngineOutputs())
            shares[client] = msgspec.structs.replace(share, stats=stats)
            stats = stats.counted()


class Shares:
    """Cuts the news of a step into those of each client. As long as the batch stays the same it is cut once."""

    def __init__(self, owners: dict[str, int]) -> None:
        self._owners = owners
        self._ids: list[str] = []  # the latest
        self._parts: dict[int, tuple[list[str], Pick]] = {}

    def split(self, outputs: EngineOutputs) -> dict[int, EngineOutputs]:
        """The columns and `special`; statistics are left out."""
        special: dict[int, list[EngineOutput]] = {}
        for output in outputs.special:
            special.setdefault(self._owners.get(output.request_id, PARENT), []).append(output)
        shares = {client: EngineOutputs(special=theirs) for client, theirs in special.items()}
        if outputs.ids:
            if outputs.ids is not self._ids:
                self._cut(outputs.ids)
            counts, column = outputs.counts, outputs.column
            for client, (ids, pick) in self._parts.items():
                picked = pick(column)
                shares[client] = EngineOutputs(
                    ids=ids,
                    tokens=list(picked if counts is None else chain.from_iterable(picked)),
                    counts=None if counts is None else list(pick(counts)),
                    special=special.get(client, []),
                )
        return shares

    def _cut(self, ids: list[str]) -> None:
        owners = np.fromiter(map(self._owners.get, ids, repeat(PARENT)), np.int64, len(ids))
        parts = {}
        for client in np.unique(owners).tolist():
            pick = _picker(np.flatnonzero(owners == client).tolist())
            known, _ = self._parts.get(client, ([], None))
            share = list(pick(ids))
            # One and the same list says to `Link.tell` that nothing has changed for this client.
            parts[client] = known if share == known else share, pick
        self._ids, self._parts = ids, parts


def _picker(rows: list[int]) -> Pick:
    """Takes these rows of a column."""
    if len(rows) == 1:
        return lambda column: (column[rows[0]],)
    return itemgetter(*rows)
