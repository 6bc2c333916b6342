"""A process of ours on another machine: the same channel and lifeline as those of a child, over TCP.

Who is to come gets an invitation, by whatever starts it there (Ray, a scheduler of clusters, a person). Whoever has one
may join: it is a secret. Messages are encrypted and come from those with the right keys alone (CURVE); the lifeline is
a TCP connection that carries the names of keys once and nothing afterwards, and is watched by the kernel, so that a
machine which is gone is noticed within seconds, and a process at once.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from quire.foundation.child import Child, Parent
from quire.foundation.errors import ConfigError, EngineDeadError
from quire.foundation.wire import Channel, Decoder, Encoder, Frame

T = TypeVar("T")
JOIN_SECONDS = 600.0  # for all to come: a cluster may have to find machines first
_GREETING_SECONDS = 10.0
_MOST_GREETING = 4096  # bytes
_ALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_GET_ADDRESS = 0x8915  # ioctl: of a network interface


class Invitation(msgspec.Struct, frozen=True):
    """Where to come: port of the lifeline, `up` of what is sent there, with the key that this is sealed with."""

    host: str
    port: int
    up: int
    key: str
    token: str

    def text(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def read(cls, text: str) -> Invitation:
        """Raises ConfigError."""
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(text), type=cls)
        except ValueError as error:
            raise ConfigError(f"this is no invitation: {error}", "join") from None


class Guest(msgspec.Struct, frozen=True):
    """Who has come. meeting: a port of its machine that is free; device: which of its machine's it has, -1: unsaid."""

    token: str
    pid: int
    host: str
    down: int
    key: str
    meeting: int
    device: int = -1


class RemoteChannel(Channel[T]):
    """A channel whose readers listen on ports. `port`: ours."""

    def __init__(self, host: str, incoming: Any) -> None:
        self._context = zmq.Context()
        self._encoder, self._decoder = Encoder(), Decoder[T](incoming)
        self._send_lock = threading.Lock()
        public, secret = zmq.curve_keypair()
        self.key = public.decode()
        self._in = self._context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._in.setsockopt(zmq.LINGER, 0)
        self._in.setsockopt(zmq.IPV6, ":" in host)
        self._in.curve_secretkey, self._in.curve_publickey, self._in.curve_server = secret, public, True
        self.port = self._in.bind_to_random_port(f"tcp://{_bracketed(host)}")
        self._out = self._context.socket(zmq.PUSH)
        for option, value in ((zmq.SNDHWM, 0), (zmq.LINGER, 0), (zmq.RECONNECT_IVL, 10), (zmq.IPV6, ":" in host)):
            self._out.setsockopt(option, value)

    def connect(self, host: str, port: int, key: str) -> None:
        """What is sent goes there, sealed with its key. To be called once, before anything is sent."""
        self._out.curve_publickey, self._out.curve_secretkey = zmq.curve_keypair()
        self._out.curve_serverkey = key.encode()
        self._out.connect(f"tcp://{_bracketed(host)}:{port}")

    def _send(self, frames: list[Frame]) -> None:
        with contextlib.suppress(zmq.Again):  # nobody is there: its lifeline tells
            self._out.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) == 1)


class RemoteChild(Child[T]):
    """The side that invites. `admit` waits for the guest; until then nothing can be sent.

    host: our address as the guest's machine knows it.
    """

    def __init__(self, incoming: Any, title: str, host: str) -> None:
        self.title = title
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))
        self._remote: RemoteChannel[T] = RemoteChannel(host, incoming)
        self.channel = self._remote
        self._door = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._lifeline = socket.socket()
        self.guest: Guest | None = None
        self._token = secrets.token_urlsafe(24)
        self.invitation = Invitation(
            host, self._door.getsockname()[1], self._remote.port, self._remote.key, self._token
        )
        self._close = weakref.finalize(self, _leave, self._door, self.channel, self._folder)

    def admit(self, seconds: float = JOIN_SECONDS) -> Guest:
        """Wait for who has the invitation. Raises EngineDeadError if nobody comes."""
        deadline = time.monotonic() + seconds
        while self.guest is None:
            self._door.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = self._door.accept()
            except TimeoutError:
                raise EngineDeadError(f"the {self.title} has not come within {seconds:.0f} s") from None
            guest = _greeted(connection)
            if guest is None or not hmac.compare_digest(guest.token, self._token):
                connection.close()
                continue
            self.guest, self._lifeline = guest, connection
            _keep_alive(connection)
        self._door.close()
        self._remote.connect(self.guest.host, self.guest.down, self.guest.key)
        return self.guest

    @property
    def pid(self) -> int:
        return 0 if self.guest is None else self.guest.pid

    def kill(self) -> None:
        """It ends itself once its lifeline is cut."""
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_RDWR)

    def stop(self, grace: float = 5.0) -> None:
        """Wait up to `grace` seconds for it to end by itself, then cut its lifeline. Idempotent."""
        if self.guest is not None and self._lifeline.fileno() >= 0:
            self._lifeline.settimeout(max(grace, 0.001))
            with contextlib.suppress(OSError):
                self._lifeline.recv(1)
            self.kill()
            self._lifeline.close()
        self._close()

    @property
    def _was_killed(self) -> bool:
        return False  # nobody here knows

    def _how_it_ended(self) -> str:
        return f"on {self.guest.host if self.guest else 'no machine'} is gone"


class RemoteParent(Parent[T]):
    """The guest's side. From now on this process ends when the other side does."""

    def __init__(self, invitation: Invitation, incoming: Any, device: int = -1) -> None:
        """Raises ConfigError if nobody is there, or not at this address."""
        try:
            self._lifeline = socket.create_connection((invitation.host, invitation.port), _GREETING_SECONDS)
        except OSError as error:
            raise ConfigError(f"nobody waits at {invitation.host}:{invitation.port}: {error}", "join") from None
        host = self._lifeline.getsockname()[0]
        channel: RemoteChannel[T] = RemoteChannel(host, incoming)
        self.channel = channel
        channel.connect(invitation.host, invitation.up, invitation.key)
        _talk_over(host)
        guest = Guest(invitation.token, os.getpid(), host, channel.port, channel.key, _free_port(host), device)
        self._lifeline.sendall(msgspec.json.encode(guest) + b"\n")
        _keep_alive(self._lifeline)
        self._remains: list[Path] = []
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            self._lifeline.settimeout(None)
            self._lifeline.recv(1)
        os._exit(0)


def _greeted(connection: socket.socket) -> Guest | None:
    connection.settimeout(_GREETING_SECONDS)
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < _MOST_GREETING:
            if not (part := connection.recv(_MOST_GREETING)):
                return None
            data += part
        return msgspec.json.decode(data, type=Guest)
    except (OSError, ValueError):
        return None


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _leave(door: socket.socket, channel: Channel[Any], folder: Path) -> None:
    door.close()
    channel.close()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _talk_over(host: str) -> None:
    """Let libraries of ranks use the network interface of this address."""
    name = interface_of(host)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name is not None:
            os.environ.setdefault(variable, name)


def interface_of(host: str) -> str | None:
    """The network interface that has this IPv4 address; None if nobody knows."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
