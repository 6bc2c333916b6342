"""Ranks that somebody else starts: torchrun, Slurm, a StatefulSet, a person. They come with `quire worker`.

The core opens a door at QUIRE_MASTER (HOST:PORT). A rank knocks there with its number and the cluster's key, and gets
its invitation.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from collections.abc import Sequence

import msgspec

from quire.config.resolve import Resolved
from quire.executor.messages import FromWorker
from quire.executor.several_machines import SeveralMachines
from quire.foundation.errors import ConfigError, EngineDeadError
from quire.foundation.log import get_logger
from quire.foundation.remote import JOIN_SECONDS, RemoteChild

MASTER, KEY = "QUIRE_MASTER", "QUIRE_CLUSTER_KEY"
_KNOCK_SECONDS = 10.0
_MOST_KNOCK = 4096  # bytes
_log = get_logger(__name__)


class Knock(msgspec.Struct, frozen=True):
    """What a rank says at the door. rank: its number, -1: whichever is free."""

    key: str
    rank: int = -1


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """invitation: its text; error: why there is none."""

    invitation: str = ""
    rank: int = -1
    error: str = ""


def master_address() -> tuple[str, int]:
    """Raises ConfigError."""
    host, _, port = os.environ.get(MASTER, "").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"{MASTER} must be HOST:PORT, where ranks find the core, got {os.environ.get(MASTER)!r}", MASTER
        )
    return host.strip("[]"), int(port)


def cluster_key() -> str:
    """Raises ConfigError: whoever has it may be a rank."""
    if not (key := os.environ.get(KEY)):
        raise ConfigError(f"{KEY} must be set, to the same secret for the core and its ranks", KEY)
    return key


class ExternalExecutor(SeveralMachines):
    """Waits for its ranks."""

    def _host(self) -> str:
        host, port = master_address()
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])

    def _invite(self, resolved: Resolved, children: Sequence[RemoteChild[FromWorker]]) -> None:
        del resolved
        key, (host, port) = cluster_key(), master_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            door = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"{MASTER}: {host}:{port} cannot be bound: {error}", MASTER) from None
        open_ranks = set(range(len(children)))
        _log.info("waiting for %d ranks at %s:%d", len(children), host, port)
        deadline = time.monotonic() + JOIN_SECONDS
        with door:
            while open_ranks:
                door.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = door.accept()
                except TimeoutError:
                    missing = ", ".join(map(str, sorted(open_ranks)))
                    raise EngineDeadError(f"ranks {missing} have not come within {JOIN_SECONDS:.0f} s") from None
                with connection:
                    self._answer(connection, key, children, open_ranks)

    @staticmethod
    def _answer(
        connection: socket.socket, key: str, children: Sequence[RemoteChild[FromWorker]], open_ranks: set[int]
    ) -> None:
        connection.settimeout(_KNOCK_SECONDS)
        try:
            knock = msgspec.json.decode(connection.makefile("rb").readline(_MOST_KNOCK), type=Knock)
            rank = min(open_ranks) if knock.rank < 0 else knock.rank
            if not hmac.compare_digest(knock.key.encode(), key.encode()):
                answer = Answer(error=f"the key is not that of the core ({KEY})")
            elif rank not in open_ranks:
                answer = Answer(error=f"rank {rank} is none of the {len(children)} ranks, or has come already")
            else:
                answer = Answer(children[rank].invitation.text(), rank)
            connection.sendall(msgspec.json.encode(answer) + b"\n")
        except (OSError, ValueError) as error:
            _log.warning("somebody at the door was not understood: %s", error)
            return
        if answer.invitation:
            open_ranks.discard(rank)


def knock(rank: int) -> Answer:
    """As a rank, ask the core for an invitation. Raises OSError if nobody is there, ConfigError if it is refused."""
    with socket.create_connection(master_address(), _KNOCK_SECONDS) as connection:
        connection.sendall(msgspec.json.encode(Knock(cluster_key(), rank)) + b"\n")
        line = connection.makefile("rb").readline(65536)
    if not line:
        raise OSError("the core closed the connection")
    answer = msgspec.json.decode(line, type=Answer)
    if answer.error:
        raise ConfigError(answer.error, "rank")
    return answer
