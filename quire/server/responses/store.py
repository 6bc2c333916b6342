"""Responses that are kept for later requests: in memory, the least recently used go first."""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from quire.server.http.errors import NotStoredError
from quire.server.responses.background import BackgroundRun

Item = dict[str, Any]


def new_response_id(number: int) -> str:
    """number: of the front end that keeps the response."""
    return f"resp_{number:02x}{secrets.token_hex(15)}"


def number_of(response_id: str) -> int | None:
    """What `new_response_id` put in; None for an id that somebody else made."""
    found = re.fullmatch("resp_([0-9a-f]{2})[0-9a-f]{30}", response_id)
    return None if found is None else int(found[1], 16)


@dataclass(slots=True, eq=False)
class Turn:
    """The items that one response added to a conversation: its input, then its output.

    A later turn holds the turns before it, whether their responses are still kept or not.
    """

    before: Turn | None
    items: list[Item]
    num_bytes: int = 0
    num_holders: int = 0  # its response, if that is kept, and later turns

    def conversation(self) -> list[Item]:
        turns = [self]
        while (before := turns[-1].before) is not None:
            turns.append(before)
        return [item for turn in reversed(turns) for item in turn.items]


@dataclass(slots=True, eq=False)
class Stored:
    response: dict[str, Any]
    input: list[Item]
    before: Turn | None = None
    run: BackgroundRun | None = None  # if it is made in the background
    turn: Turn = field(init=False)

    def __post_init__(self) -> None:
        self.turn = Turn(self.before, [])

    @property
    def is_running(self) -> bool:
        return self.run is not None and not self.run.is_done

    def items(self) -> Iterator[Item]:
        yield from self.input
        yield from self.response["output"]


class ResponseStore:
    """`max_bytes`: of what is kept, as JSON. 0: nothing is kept. What still runs is kept in any case."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._by_id: OrderedDict[str, Stored] = OrderedDict()
        self._items: dict[str, Item] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._by_id

    def get(self, response_id: str, param: str = "response_id") -> Stored:
        """Raises ApiError 404 naming `param`."""
        stored = self._by_id.get(response_id)
        if stored is None:
            raise NotStoredError(response_id, param)
        self._by_id.move_to_end(response_id)
        return stored

    def item(self, item_id: str) -> Item | None:
        """An input or output item of a stored response."""
        return self._items.get(item_id)

    def open(self, stored: Stored) -> None:
        """Keep a response that is still made, in place of one with its id; `settle` must follow."""
        if (old := self._by_id.get(stored.response["id"])) is not None:
            self._forget(old)
        self._by_id[stored.response["id"]] = stored
        stored.turn.num_holders = 1
        if stored.before is not None:
            stored.before.num_holders += 1

    def settle(self, stored: Stored) -> None:
        """The response is final (and was not deleted meanwhile): count it, and let older ones go."""
        turn, response = stored.turn, stored.response
        if self._by_id.get(response["id"]) is not stored:
            return
        turn.items = list(stored.items())
        num_frames = stored.run.num_bytes if stored.run is not None else 0
        turn.num_bytes = len(orjson.dumps([response, stored.input])) + num_frames
        self.num_bytes += turn.num_bytes
        self._items |= {item["id"]: item for item in turn.items if "id" in item}
        for old in list(self._by_id.values()):
            if self.num_bytes <= self.max_bytes:
                break
            if not old.is_running:
                self._forget(old)

    def delete(self, stored: Stored) -> None:
        self._forget(stored)

    def _forget(self, stored: Stored) -> None:
        del self._by_id[stored.response["id"]]
        for item in stored.turn.items:
            if self._items.get(item.get("id", "")) is item:
                del self._items[item["id"]]
        self._release(stored.turn)

    def _release(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.num_holders -= 1
            if turn.num_holders > 0:
                return
            self.num_bytes -= turn.num_bytes
            turn = turn.before
