"""Which server a request goes to."""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence

from quire.config.route import RouteConfig
from quire.router.backend import Backend
from quire.router.prompt import BYTES_A_TOKEN, ENDS, Wish
from quire.scheduling.affinity import Affinity

ANSWER_TOKENS = 64  # that a request under way weighs, in prompt tokens
MOST_STORED = 100_000  # ids of stored things whose server is known


class Chooser:
    """Knows what went where lately."""

    def __init__(self, config: RouteConfig) -> None:
        self._policy = config.policy
        self._affinity: Affinity[str] = Affinity(config.prefix_entries)
        self._stored: OrderedDict[str, str] = OrderedDict()  # id of a response, file or batch → URL
        self._turn = itertools.count()

    @property
    def wants_hashes(self) -> bool:
        return self._policy == "prefix"

    def choose(self, backends: Sequence[Backend], wish: Wish, session: str | None) -> Backend | None:
        """One of `backends`, which take requests; None if there are none.

        session: requests of the same one go to the same server, as long as that is there.
        """
        if not backends:
            return None
        serving = [backend for backend in backends if wish.model in backend.model_ids] if wish.model else []
        able = serving or list(backends)
        if wish.previous is not None and (home := self.home_of(wish.previous, able)) is not None:
            return home
        if session is not None:
            return max(able, key=lambda backend: _weight(session, backend.url))
        turn = next(self._turn)
        if self._policy == "round_robin":
            return able[turn % len(able)]
        cached = self._affinity.find(wish.hashes)

        def cost(place: int) -> tuple[float, int]:
            backend = able[place]
            depth = cached.get(backend.url, 0)
            new = max(0, wish.num_bytes - (ENDS[depth - 1] if depth else 0)) / BYTES_A_TOKEN
            return ANSWER_TOKENS * backend.load + (new if cached else 0), (place - turn) % len(able)

        return able[min(range(len(able)), key=cost)]

    def note(self, wish: Wish, backend: Backend) -> None:
        """It goes there."""
        if wish.hashes:
            self._affinity.note(wish.hashes, backend.url)

    def store(self, name: str, backend: Backend) -> None:
        """A stored thing is there."""
        self._stored[name] = backend.url
        self._stored.move_to_end(name)
        if len(self._stored) > MOST_STORED:
            self._stored.popitem(last=False)

    def home_of(self, name: str, backends: Sequence[Backend]) -> Backend | None:
        """Where a stored thing is."""
        url = self._stored.get(name)
        return next((backend for backend in backends if backend.url == url), None)

    def forget(self, backend: Backend) -> None:
        """Its cache is gone."""
        self._affinity.forget(backend.url)


def _weight(session: str, url: str) -> bytes:
    """Highest of one server for each session, however many others come and go."""
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()
