"""A Python process of our own: private sockets to it, and a lifeline that tells each side when the other is gone.

The lifeline is a socket pair on which nothing is ever written. When a process ends, however it ends, the kernel closes
its side and the other side becomes readable. It costs no polling, and unlike a parent-death signal it does not
depend on which thread started the child. The child is started by its module's name, so the caller's script needs no
`if __name__ == "__main__"` guard, and nothing is pickled.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from quire.foundation.errors import (
    ConfigError,
    DoesNotFitError,
    EngineDeadError,
    InputError,
    QuireError,
    WeightsError,
)
from quire.foundation.wire import Channel

T = TypeVar("T")

_MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 107
_REAP_SECONDS = 1.0
_LAST_WORDS_SECONDS = 0.05  # a message sent just before the end may reach us after the end does
_RELAYED: dict[str, type[QuireError]] = {
    kind.__name__: kind
    for kind in (InputError, ConfigError, WeightsError, DoesNotFitError, EngineDeadError, QuireError)
}


class Failure(msgspec.Struct, frozen=True, tag="failure", omit_defaults=True):
    """An error on its way to another process, where it is raised as the same class with the same text.

    One that is not Quire's own becomes a plain QuireError with its class name and first line.
    """

    kind: str
    message: str
    field: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, QuireError):
            kind = next(k.__name__ for k in type(error).__mro__ if k.__name__ in _RELAYED)
            field = getattr(error, "param", None) or getattr(error, "field", None)
            return cls(kind, str(error), field, error.code)
        first_line = next(iter(str(error).splitlines()), "")
        return cls("QuireError", f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__)

    def error(self) -> QuireError:
        kind = _RELAYED.get(self.kind, QuireError)
        fields = (self.field,) if issubclass(kind, InputError | ConfigError) else ()
        error = kind(self.message, *fields)
        error.code = self.code
        return error


class Child(Generic[T]):
    """The parent's side: start `module` as a process, send to it, receive from it, end it.

    inherited: file descriptors that the child has too, under the same numbers. env: variables that it has besides.
    arguments: behind those that `Parent` takes.
    """

    def __init__(
        self,
        module: str,
        incoming: Any,
        title: str,
        inherited: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.title = title
        self._folder = socket_folder()
        self.channel: Channel[T] = Channel(self._folder, incoming, parent=True)
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(self._folder), str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno(), *inherited],
                stdin=subprocess.DEVNULL,
                stdout=2,  # whatever a library prints there must not get into our own output
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), **(env or {})},
                process_group=0,  # Ctrl-C is for the parent alone
            )
        self._close: weakref.finalize[Any, Any] = weakref.finalize(
            self, _close, self._process, self._lifeline, self.channel, self._folder
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def folder(self) -> Path:
        """That only this user can enter, and that is gone after the child, or with us."""
        return self._folder

    @property
    def lifeline(self) -> int:
        """File descriptor that becomes readable when the child is gone."""
        return self._lifeline.fileno()

    @property
    def is_open(self) -> bool:
        """Whether `stop` has not been called."""
        return self._close.alive

    def receive(self, timeout: float | None = None) -> T | None:
        """The next message, or None after `timeout` seconds.

        Raises EngineDeadError if the child is gone and all that it sent has been read.
        """
        message = self.channel.receive()
        if message is None and (timeout is None or timeout > 0):
            self.channel.wait(timeout, self.lifeline)
            message = self.channel.receive()
        if message is None:
            self.check()
        return message

    def check(self) -> None:
        """Raises EngineDeadError if the child is gone."""
        if not self.is_open:
            raise EngineDeadError(f"the {self.title} was shut down")
        if not _is_readable(self._lifeline):
            return
        if self.channel.wait(_LAST_WORDS_SECONDS):
            return  # they are read before its end is reported
        raise EngineDeadError(
            f"the {self.title} (pid {self.pid}) {self._how_it_ended()}",
            was_killed=self._was_killed,
        )

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped it, by a signal: it is there, and does nothing. False where nobody tells."""
        try:
            told = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return told.rpartition(")")[2].split()[0] == "T"

    @property
    def _was_killed(self) -> bool:
        return self._process.returncode == -signal.SIGKILL

    def kill(self) -> None:
        """End it now, from any thread; who waits for its messages learns of it. `stop` is to follow."""
        self._process.kill()

    def stop(self, grace: float = 5.0) -> None:
        """Wait up to `grace` seconds for the child to end by itself, then kill it. Removes every trace. Idempotent."""
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            pass
        self._close()

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _close(process: subprocess.Popen[bytes], lifeline: socket.socket, channel: Channel[Any], folder: Path) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    lifeline.close()
    channel.close()
    shutil.rmtree(folder, ignore_errors=True)


class Parent(Generic[T]):
    """The child's side. Construct it first thing: from then on the parent alone decides when this process ends."""

    def __init__(self, arguments: list[str], incoming: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        folder, lifeline = Path(arguments[0]), int(arguments[1])
        os.set_inheritable(lifeline, False)  # else a grandchild would keep it open after our death
        self.channel: Channel[T] = Channel(folder, incoming, parent=False)
        self._remains = [folder]
        threading.Thread(
            target=_die_with_parent, args=(socket.socket(fileno=lifeline), self._remains), name="lifeline", daemon=True
        ).start()

    def clean_up(self, folder: Path) -> None:
        """Remove this folder too if the parent dies and cannot."""
        self._remains.append(folder)

    def receive(self, timeout: float | None = None) -> T | None:
        """The next message, or None after `timeout` seconds. A dead parent needs no handling: we end with it."""
        message = self.channel.receive()
        if message is None and (timeout is None or timeout > 0):
            self.channel.wait(timeout)
            message = self.channel.receive()
        return message


def leave(code: int) -> NoReturn:
    """End this process as `sys.exit` does, and leave the interpreter as it stands: while it is taken apart, what binds
    Triton to Python writes a page of what it calls leaks to the terminal."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _die_with_parent(lifeline: socket.socket, remains: list[Path]) -> None:
    try:
        lifeline.recv(1)
    except OSError:
        pass
    for folder in remains:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _is_readable(lifeline: socket.socket) -> bool:
    try:
        lifeline.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def socket_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    if len(os.fsencode(folder)) + len("/down") > _MAX_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="quire-", dir="/tmp"))
    return folder
