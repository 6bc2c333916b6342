"""LoRA adapters in the device's slots: whoever runs holds its own there; others make room, least recently used first.

A request whose adapter finds no slot stands aside, and those behind it go on. Lest it wait for ever for a slot whose
adapter never falls out of use, after a while no more requests are let in for the adapter that the fewest use.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.types.adapter import Adapter
from quire.types.plan import AdapterInSlot


@dataclass(slots=True)
class _Place:
    slot: int
    adapter: Adapter
    num_running: int = 0


class AdapterSlots:
    """num_slots: 0: requests have no adapters."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._places: dict[str, _Place] = {}  # by key, the least recently used first
        self._unused = list(range(num_slots, 0, -1))
        self._changes: list[AdapterInSlot] = []
        self._closed: str | None = None  # key of the adapter for which nobody more is let in

    def has_room(self, adapter: Adapter | None) -> bool:
        """Whether a request with this adapter could be seated."""
        if adapter is None:
            return True
        if adapter.key in self._places:
            return adapter.key != self._closed
        return bool(self._unused) or any(not place.num_running for place in self._places.values())

    def take(self, adapter: Adapter | None) -> int:
        """A request with this adapter, which has room, is seated. Returns the slot, 0 for none."""
        if adapter is None:
            return 0
        place = self._places.pop(adapter.key, None)
        if place is None:
            place = _Place(self._free_slot(), adapter)
            self._changes.append(AdapterInSlot(place.slot, adapter))
        self._places[adapter.key] = place
        place.num_running += 1
        return place.slot

    def _free_slot(self) -> int:
        if self._unused:
            return self._unused.pop()
        key = next(key for key, place in self._places.items() if not place.num_running)
        if key == self._closed:
            self._closed = None
        return self._places.pop(key).slot

    def give_back(self, adapter: Adapter | None) -> bool:
        """A request with it has left its seat. Returns whether the adapter may be replaced now."""
        if adapter is None:
            return False
        place = self._places[adapter.key]
        place.num_running -= 1
        if place.num_running:
            return False
        if self._closed == adapter.key:
            self._closed = None
        return True

    def close_one(self) -> None:
        """Let nobody more in for the adapter that the fewest use, until nobody does; unless there is such a one, or a
        free slot."""
        fewest = min(self._places.values(), key=lambda place: place.num_running, default=None)
        if self._closed is None and not self._unused and fewest is not None and fewest.num_running:
            self._closed = fewest.adapter.key

    def is_held_by(self, adapter: Adapter, num_running: int) -> bool:
        """Whether so many are all that run with it."""
        place = self._places.get(adapter.key)
        return place is not None and place.num_running <= num_running

    def take_changes(self) -> list[AdapterInSlot]:
        """What the worker must be told of the slots since the last plan."""
        changes, self._changes = self._changes, []
        return changes

    @property
    def running(self) -> list[str]:
        """Names of those that requests run with."""
        return sorted({place.adapter.name for place in self._places.values() if place.num_running})

    def check(self, running: list[Adapter]) -> None:
        """Raise AssertionError unless these adapters, one a running request that has any, are what is counted."""
        counted = {key: place.num_running for key, place in self._places.items() if place.num_running}
        found: dict[str, int] = {}
        for adapter in running:
            found[adapter.key] = found.get(adapter.key, 0) + 1
        assert counted == found, f"adapters in use are counted as {counted}, and are {found}"
        slots = [place.slot for place in self._places.values()] + self._unused
        assert len(set(slots)) == len(slots), "two adapters have one slot"
