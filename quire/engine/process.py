"""Main of a core process: the loop between two sockets."""

from __future__ import annotations

import sys

import msgspec

from quire.engine.core import EngineCore
from quire.engine.messages import News, Ready, Start, Stop, ToCore
from quire.executor.base import make_executor
from quire.foundation.child import Failure, Parent
from quire.foundation.errors import ConfigError, DoesNotFitError, QuireError
from quire.foundation.heap import settle_heap
from quire.foundation.log import get_logger, setup
from quire.foundation.wire import WireError
from quire.types.output import INVALID_REQUEST, EngineOutput, EngineOutputs

EXIT_STOPPED = 0
EXIT_CONFIG = 2
EXIT_MEMORY = 3
EXIT_FAILED = 4
_LINGER = 2.0  # seconds for the last messages to leave
_log = get_logger(__name__)


def main(arguments: list[str]) -> int:
    parent: Parent[ToCore] = Parent(arguments, ToCore)
    try:
        return _run(parent)
    finally:
        parent.channel.close(_LINGER)


def _run(parent: Parent[ToCore]) -> int:
    while (start := parent.receive()) is None:
        pass
    assert isinstance(start, Start)
    setup(start.resolved.config.observe.log_level)
    core = EngineCore(start.resolved, make_executor(start.resolved, start.worker))
    try:
        parent.channel.send(Ready(core.start()))
        settle_heap()
        inbox = SocketInbox(parent)
        ids: list[str] | None = None  # that the client knows: of the latest message that had any
        while not core.stopped:
            for message in core.turn(inbox, None):
                if isinstance(message, News) and message.outputs.ids:
                    message, ids = _shortened(message, ids), message.outputs.ids
                parent.channel.send(message)
        return EXIT_STOPPED if inbox.stop_came else EXIT_FAILED
    except Exception as error:
        if not isinstance(error, QuireError):
            _log.exception("the engine core ended")
        parent.channel.send(Failure.of(error))
        return _exit_code(error)
    finally:
        core.shutdown()


def _shortened(message: News, known: list[str] | None) -> News:
    """Without the ids if the client knows them."""
    if message.outputs.ids is not known:
        return message
    return News(msgspec.structs.replace(message.outputs, ids=None))


def _exit_code(error: Exception) -> int:
    if isinstance(error, DoesNotFitError):
        return EXIT_MEMORY
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED


class SocketInbox:
    """The Inbox of a core in its own process."""

    def __init__(self, parent: Parent[ToCore]) -> None:
        self._parent = parent
        self.stop_came = False

    def drain(self) -> list[ToCore]:
        messages: list[ToCore] = []
        while True:
            try:
                message = self._parent.channel.receive()
            except WireError as error:
                self._answer_unreadable(error)
                continue
            if message is None:
                return messages
            self.stop_came = self.stop_came or isinstance(message, Stop)
            messages.append(message)

    def wait(self, timeout: float | None, *sentinels: int) -> None:
        self._parent.channel.wait(timeout, *sentinels)

    def _answer_unreadable(self, error: WireError) -> None:
        """A request of wrong types ends with an error of its own, if its id can be found; nothing else suffers."""
        _log.error("a message was dropped: %s", error)
        try:
            request_id = msgspec.msgpack.decode(error.body)["request"]["id"]
        except (msgspec.DecodeError, LookupError, TypeError, ValueError):
            return
        output = EngineOutput(
            request_id=str(request_id), finish_reason="error", stop_reason=INVALID_REQUEST, error=str(error)
        )
        self._parent.channel.send(News(EngineOutputs(special=[output])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
