"""Main of a core process: the loop between two sockets."""

from __future__ import annotations

import sys

from quire.engine.clients import Clients
from quire.engine.core import EngineCore
from quire.engine.messages import FromParent, Ready, StartCore
from quire.executor.base import WORKER, import_worker, make_executor
from quire.foundation.bytecode import keep_bytecode
from quire.foundation.child import Failure, Parent, leave
from quire.foundation.errors import ConfigError, DoesNotFitError, QuireError
from quire.foundation.heap import imports_that_stay, settle_heap
from quire.foundation.log import get_logger, setup
from quire.foundation.registry import load
from quire.foundation.threads import switch_soon
from quire.foundation.wake_gpu import wake_gpu

EXIT_STOPPED = 0
EXIT_CONFIG = 2
EXIT_MEMORY = 3
EXIT_FAILED = 4
_LINGER = 2.0  # seconds for the last messages to leave
_log = get_logger(__name__)


def main(arguments: list[str]) -> int:
    parent: Parent[FromParent] = Parent(arguments, FromParent)
    clients = Clients(parent)
    keep_bytecode("torch")
    if "gpu" in arguments[2:]:
        wake_gpu()
    if "torch" in arguments[2:]:  # nothing has been asked for yet
        with imports_that_stay():
            load(WORKER)
    try:
        return _run(parent, clients)
    finally:
        clients.close(_LINGER)


def _run(parent: Parent[FromParent], clients: Clients) -> int:
    while (start := parent.receive()) is None:
        pass
    assert isinstance(start, StartCore)
    setup(start.resolved.config.observe.log_level)
    core: EngineCore | None = None
    try:
        if start.resolved.executor == "uni" and "torch" not in sys.modules:
            with imports_that_stay():
                import_worker(start.resolved, start.worker)
        core = EngineCore(start.resolved, make_executor(start.resolved, start.worker), before=start.before)
        clients.send([Ready(core.start())])
        settle_heap()
        switch_soon()
        while not core.stopped:
            clients.send(core.turn(clients, None))
        return EXIT_STOPPED if clients.stop_came else EXIT_FAILED
    except Exception as error:
        if not isinstance(error, QuireError):
            _log.exception("the engine core ended")
        clients.send([Failure.of(error)])
        return _exit_code(error)
    finally:
        if core is not None:
            core.shutdown()


def _exit_code(error: Exception) -> int:
    if isinstance(error, DoesNotFitError):
        return EXIT_MEMORY
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
