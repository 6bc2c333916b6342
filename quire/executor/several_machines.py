"""Ranks on machines of a cluster: the executor of worker processes, whose processes come by invitation."""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Sequence

from quire.config.resolve import Resolved
from quire.executor.messages import FromWorker
from quire.executor.multiproc import MultiprocExecutor
from quire.foundation.child import Child
from quire.foundation.remote import Guest, RemoteChild
from quire.types.ranks import Rank


class SeveralMachines(MultiprocExecutor):
    """Who derives from it says how the invitations get to the ranks."""

    _guests: list[Guest]

    def _make_children(self, resolved: Resolved, titles: Sequence[str]) -> list[Child[FromWorker]]:
        host = self._host()
        children = [RemoteChild[FromWorker](FromWorker, title, host) for title in titles]
        try:
            self._invite(resolved, children)
            self._guests = [child.admit() for child in children]
        except BaseException:
            for child in children:
                child.stop(grace=0)
            self._forget()
            raise
        return list(children)

    def _rank(self, index: int, size: int, stages: int, contexts: int) -> Rank:
        first = self._guests[0]
        host = f"[{first.host}]" if ":" in first.host else first.host
        return Rank(index, size, f"tcp://{host}:{first.meeting}", stages, self._guests[index].device, contexts)

    @abstractmethod
    def _host(self) -> str:
        """Our address, as the ranks' machines know it."""

    @abstractmethod
    def _invite(self, resolved: Resolved, children: Sequence[RemoteChild[FromWorker]]) -> None:
        """Let each of the ranks have its invitation. Raises EngineDeadError or ConfigError."""

    def _forget(self) -> None:
        """What was made for the ranks is not needed any more."""

    def shutdown(self) -> None:
        super().shutdown()
        self._forget()


def own_address(towards: str) -> str:
    """The address that packets to `towards` come from."""
    family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asking:
        asking.connect(address)
        return str(asking.getsockname()[0])
