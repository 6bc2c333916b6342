"""Main of one of several front ends: HTTP, templates, tokens and parsers on one side, the shared core on the other."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client import DataParallelClient, JoinedClient
from quire.foundation.child import Failure, Parent
from quire.foundation.errors import EngineDeadError, QuireError
from quire.foundation.log import get_logger
from quire.server.app import build_app, protect
from quire.server.dashboard.others import answer_peers
from quire.server.http.listener import bind_unix
from quire.server.http.protocol import ABORT_SECONDS, HttpConfig
from quire.server.http.server import HttpServer
from quire.server.processes.messages import Attach, Begin, Drain, EngineDied, Prepare, Serves, ToFrontEnd
from quire.server.processes.peer_servers import OWNER, PeerServers, private_socket
from quire.server.processes.serving import Serving, loop_factory, setup_logs
from quire.server.processes.shared_counters import PID, SharedCounters
from quire.server.service import Service

if TYPE_CHECKING:
    from quire.frontend.tokenization.tokenizer import Tokenizer

EXIT_STOPPED, EXIT_FAILED = 0, 1
_LINGER = 1.0  # seconds for the last message to leave
log = get_logger(__name__)


def main(arguments: list[str]) -> int:
    parent: Parent[ToFrontEnd] = Parent(arguments, ToFrontEnd)
    try:
        while (begin := parent.receive()) is None:
            pass
        assert isinstance(begin, Begin)
        setup_logs(begin.config.observe.log_level)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(FrontEnd(parent, begin).main())
        return EXIT_STOPPED
    except Exception as error:
        if not isinstance(error, QuireError):
            log.exception("a front end ended")
        parent.channel.send(Failure.of(error))
        return EXIT_FAILED
    finally:
        parent.channel.close(_LINGER)


class FrontEnd:
    def __init__(self, parent: Parent[ToFrontEnd], begin: Begin) -> None:
        folder = Path(begin.folder)
        parent.clean_up(folder)
        counters = SharedCounters(folder, begin.count, begin.number)
        counters.vacate(begin.number)
        counters.mine[PID] = os.getpid()
        self._parent = parent
        self._begin = begin
        self._service = Service(begin.config, begin.serve, begin.created, counters)
        app = build_app(self._service)
        peers = PeerServers(folder, begin.count, begin.number, self._service.in_flight)
        peers.install(app)
        answer_peers(peers, self._service)
        public = protect(peers.with_owner(app), self._service, begin.keys)
        config = HttpConfig(peers.with_door(public, app), begin.serve)
        listener = socket.socket(fileno=begin.listener)
        self._http = HttpServer(config, shared=(listener, counters), waits=not begin.answers_early)
        self._private = bind_unix(str(private_socket(folder, begin.number)))
        self._serving = Serving(self._service, app)
        self._cores: dict[int, JoinedClient] = {}
        self._num_gone = 0  # of them, for good
        self._tokenizer: asyncio.Task[Tokenizer | None] | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._died = asyncio.Event()

    async def main(self) -> None:
        """Until told to stop, or the engine is dead."""
        loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._parent.channel.fileno(), self._read)
        http_task = self._serving.start(self._http, self._private)
        stopped = asyncio.create_task(self._serving.stop.wait())
        died = asyncio.create_task(self._died.wait())
        self._read()  # what came before gives no sign
        try:
            ends: list[asyncio.Future[Any]] = [stopped, died, http_task, self._failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            if died.done() and (tasks := self._service.in_flight.tasks):
                await asyncio.wait(tasks, timeout=ABORT_SECONDS)  # they end by themselves, each with its error
            elif stopped.done():
                await self._serving.drain()
        finally:
            loop.remove_reader(self._parent.channel.fileno())
            await self._serving.close()
            for core in self._cores.values():
                core.shutdown()

    def _read(self) -> None:
        while (message := self._parent.channel.receive()) is not None:
            match message:
                case Prepare(resolved):
                    from quire.frontend.tokenization.tokenizer import load_tokenizer

                    self._tokenizer = asyncio.create_task(asyncio.to_thread(load_tokenizer, resolved))
                case Attach(core, info, folder) if core in self._cores:
                    self._cores[core].rejoin(info, Path(folder))
                case Attach(core, info, folder):
                    self._cores[core] = JoinedClient(info, Path(folder))
                    if len(self._cores) == self._begin.config.runtime.data_parallel_size:
                        self._attaching = asyncio.create_task(self._attach())
                        self._attaching.add_done_callback(self._on_attached)
                case EngineDied(core, cause, was_killed, seconds):
                    self._on_death(core, cause, was_killed, seconds)
                case Drain(at_once):
                    self._serving.ask_to_stop(at_once=at_once)
                case Begin():
                    pass

    def _on_death(self, core: int, cause: str, was_killed: bool, seconds: float | None) -> None:
        if core in self._cores:
            self._cores[core].die(
                cause, was_killed=was_killed, for_good=seconds is None, restart_seconds=seconds or 0.0
            )
        self._num_gone += seconds is None
        if self._num_gone == self._begin.config.runtime.data_parallel_size:
            self._died.set()

    async def _attach(self) -> None:
        from quire.frontend.async_engine import AsyncLLM

        assert self._tokenizer is not None
        cores = [self._cores[number] for number in sorted(self._cores)]
        engine = AsyncLLM(cores[0] if len(cores) == 1 else DataParallelClient(cores), await self._tokenizer)
        await self._serving.attach(engine)
        await engine.refresh_stats()
        if self._begin.number == OWNER:
            self._serving.batches.resume()
        self._http.accept()
        self._parent.channel.send(Serves())

    def _on_attached(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done() and not isinstance(error, EngineDeadError):
            self._failed.set_exception(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
