"""The process that a server of several front ends begins with: it starts the core and the front ends, watches them,
starts again what dies of them, and ends them all. No request and no token goes through it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.engine import EngineConfig
from quire.config.resolve import Resolved, resolve
from quire.config.serve import ServeConfig
from quire.engine.client import ProcessClient
from quire.foundation.child import Child, Failure, socket_folder
from quire.foundation.errors import EngineDeadError, QuireError
from quire.foundation.log import get_logger
from quire.foundation.started import process_age
from quire.observe.profiling import StartClock
from quire.server.http.auth import load_keys
from quire.server.http.listener import bind
from quire.server.http.protocol import ABORT_SECONDS
from quire.server.processes.banner import ENGINE, tell_ready
from quire.server.processes.messages import Attach, Begin, Drain, EngineDied, FromFrontEnd, Prepare, Serves, ToFrontEnd
from quire.server.processes.peer_servers import OWNER
from quire.server.processes.pulse import beat_seconds
from quire.server.processes.record import record
from quire.server.processes.shared_counters import ANSWERS, BEATS, SharedCounters
from quire.server.service import Service

if TYPE_CHECKING:
    from quire.engine.client import EngineInfo

EXIT_OK, EXIT_ENGINE_DEAD = 0, 4
MAX_FRONT_ENDS = 64
MAX_RESTARTS, RESTART_WINDOW = 5, 60.0  # so many within so many seconds; one more ends the server
START_SECONDS = 120.0  # without a sign of life for a front end that has not served yet; loading holds up its event loop
CLOSE_SECONDS = 2 * ABORT_SECONDS + 4  # for a front end to end after its drain
log = get_logger(__name__)


class FrontEndHandle:
    """A front end process as its supervisor sees it. `clients`: its number with each core that it has joined.

    beats: how many signs of life it had given when one was last new, at `seen` (time.monotonic()).
    """

    def __init__(self, number: int, listener: socket.socket) -> None:
        self.number = number
        self.clients: dict[int, int] = {}
        self.serves = False
        self.beats = 0.0
        self.seen = time.monotonic()
        title = f"front end {number}"
        self.child: Child[FromFrontEnd] = Child(
            "quire.server.processes.front_end", FromFrontEnd, title, inherited=[listener.fileno()]
        )

    def send(self, message: ToFrontEnd) -> None:
        self.child.channel.send(message)


class Supervisor:
    def __init__(self, config: EngineConfig, serve: ServeConfig) -> None:
        self.config = config
        self.serve = serve
        self._count = serve.api_server_count
        self._created = int(time.time())
        self._resolved: Resolved | None = None
        self._cores: list[ProcessClient] = []  # that have been started
        self._living: dict[int, ProcessClient] = {}  # those of them that live, by their numbers
        self._gone: dict[int, EngineDied] = {}  # those that do not, as it was told
        self._has_loaded = False
        self._watching: list[asyncio.Task[None]] = []
        self._front_ends: dict[int, FrontEndHandle] = {}  # that live
        self._recordings: dict[int, asyncio.Task[None]] = {}  # of flight records, by core
        self._num_clients = 0
        self._restarts: deque[float] = deque()
        self._num_ready = 0  # front ends
        self._is_ready = asyncio.Event()  # all of them have served
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()  # a front end is gone

    async def main(self) -> int:
        start = StartClock()
        self._keys = load_keys(self.serve)
        self._listener = bind(self.serve)
        self._folder = socket_folder()
        self._counters = SharedCounters(self._folder, self._count)
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = self._loop.create_future()  # the exit code, or why the server cannot go on
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signal_number, self._on_signal, signal_number)
        self._loop.add_signal_handler(signal.SIGUSR1, self._ask_for_record)
        tasks: list[asyncio.Task[Any]] = []
        self._period = beat_seconds(self.serve.hang_timeout)
        self._watch_front_ends(time.monotonic())
        try:
            for number in range(self._count):
                self._counters.vacate(number)
                self._start(number)
            starting = asyncio.create_task(self._start_all(start))
            stopped = asyncio.create_task(self._stop.wait())
            tasks += [starting, stopped]
            await _first_of(starting, stopped, self._over)
            if not starting.done():
                await self._give_up(starting)
            if self._over.done():
                return self._over.result()
            if stopped.done():
                return EXIT_OK
            starting.result()
            await _first_of(stopped, self._over)
            if not self._over.done():
                await self._drain()
                return EXIT_OK
            await self._all_gone(CLOSE_SECONDS)  # they have been told
            return self._over.result()
        finally:
            for task in tasks:
                task.cancel()
            self._close()

    # -- the front ends ------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        front_end = self._front_ends[number] = FrontEndHandle(number, self._listener)
        front_end.send(
            Begin(
                number=number,
                count=self._count,
                config=self.config,
                serve=self.serve,
                keys=self._keys,
                folder=str(self._folder),
                listener=self._listener.fileno(),
                answers_early=number == OWNER and not self._is_ready.is_set(),
                created=self._created,
            )
        )
        if self._resolved is not None:
            front_end.send(Prepare(self._resolved))
        if self._has_loaded:
            for core in range(len(self._cores)):
                self._attach(front_end, core)
        for fd in (front_end.child.channel.fileno(), front_end.child.lifeline):
            self._loop.add_reader(fd, self._read, front_end)
        self._read(front_end)  # what came before gives no sign

    def _attach(self, front_end: FrontEndHandle, core: int) -> None:
        """Make the process a client of the core, or tell it that this one is dead. One that is started again is a new
        client, with new sockets."""
        self._detach(front_end, core)
        client = front_end.clients[core] = self._num_clients
        self._num_clients += 1
        folder = self._folder / f"client-{client}"
        folder.mkdir()
        if core in self._living:
            self._living[core].join(client, folder)
        front_end.send(Attach(core, self._cores[core].info, str(folder)))
        if core in self._gone:
            front_end.send(self._gone[core])

    def _detach(self, front_end: FrontEndHandle, core: int) -> None:
        """It is no client of the core any more, or the core is no more."""
        if (client := front_end.clients.pop(core, None)) is not None:
            shutil.rmtree(self._folder / f"client-{client}", ignore_errors=True)

    def _read(self, front_end: FrontEndHandle) -> None:
        try:
            while (message := front_end.child.receive(0)) is not None:
                if isinstance(message, Failure):
                    self._end_with(message.error())
                elif isinstance(message, Serves):
                    self._on_serving(front_end)
        except EngineDeadError as error:
            self._on_death(front_end, str(error))

    def _watch_front_ends(self, expected: float) -> None:
        """Once a period: kill those that hang, which is a death like any other. expected: when this look was due."""
        now = time.monotonic()
        was_stopped = now - expected > self._period  # we were, and perhaps they were too
        self._timer = self._loop.call_later(self._period, self._watch_front_ends, now + self._period)
        for front_end in list(self._front_ends.values()):
            beats = self._counters.pages[front_end.number][BEATS]
            if beats != front_end.beats or was_stopped:
                front_end.beats, front_end.seen = beats, now
            silence = now - front_end.seen
            if silence > (self.serve.hang_timeout if front_end.serves else START_SECONDS):
                log.error(
                    "%s (pid %d) hangs: no sign of life for %.0f s; it is killed",
                    front_end.child.title, front_end.child.pid, silence,
                )  # fmt: skip
                front_end.seen = now
                front_end.child.kill()

    def _on_serving(self, front_end: FrontEndHandle) -> None:
        front_end.serves = True
        self._num_ready += 1
        if self._num_ready >= self._count:
            self._is_ready.set()

    def _on_death(self, front_end: FrontEndHandle, how: str) -> None:
        self._forget(front_end)
        if self._stop.is_set() or self._over.done():
            return
        now = time.monotonic()
        self._restarts.append(now)
        while self._restarts[0] < now - RESTART_WINDOW:
            self._restarts.popleft()
        if not self._is_ready.is_set():
            self._end_with(QuireError(f"{how} before the server was ready"))
        elif len(self._restarts) > MAX_RESTARTS:
            self._end_with(QuireError(f"{how}, the {len(self._restarts)}th death in {RESTART_WINDOW:.0f} s"))
        else:
            log.error("%s; its requests are lost, and it is started again", how)
            self._start(front_end.number)

    def _forget(self, front_end: FrontEndHandle) -> None:
        """The process is gone, or must go: what it asked of the core is aborted."""
        for fd in (front_end.child.channel.fileno(), front_end.child.lifeline):
            self._loop.remove_reader(fd)
        del self._front_ends[front_end.number]
        self._counters.vacate(front_end.number)
        for core, client in list(front_end.clients.items()):
            if core in self._living:
                self._living[core].leave(client)
            self._detach(front_end, core)
        front_end.child.stop(grace=0)
        self._changed.set()

    def _tell_all(self, message: ToFrontEnd) -> None:
        for front_end in self._front_ends.values():
            front_end.send(message)

    # -- the start -----------------------------------------------------------------------------------------------

    async def _start_all(self, start: StartClock) -> None:
        start.lap("server")
        self._resolved = await asyncio.to_thread(resolve, self.config, serving=True)
        start.lap("configuration")
        self._tell_all(Prepare(self._resolved))
        if self._over.done() or self._stop.is_set():
            return
        for core in range(self.config.runtime.data_parallel_size):
            self._cores.append(ProcessClient(self._resolved, number=core, wait=False))
        await asyncio.gather(*(asyncio.to_thread(core.wait_until_ready) for core in self._cores))
        start.lap(ENGINE)
        self._living, self._has_loaded = dict(enumerate(self._cores)), True
        self._watching = [asyncio.create_task(self._watch_engine(core)) for core in self._living]
        for front_end in self._front_ends.values():
            for core in self._living:
                self._attach(front_end, core)
        await self._is_ready.wait()
        start.lap("front ends")
        self._print(self._cores[0].info, start)

    def _print(self, info: EngineInfo, start: StartClock) -> None:
        service = Service(self.config, self.serve, self._created, self._counters)
        keyed, age = bool(self._keys), process_age()
        tell_ready(service, info, self._listener, keyed, start.seconds, age)

    # -- the end -------------------------------------------------------------------------------------------------

    async def _watch_engine(self, core: int) -> None:
        engine = self._cores[core]
        try:
            while True:
                try:
                    async for _ in engine.outputs():
                        pass
                except EngineDeadError as error:
                    await self._restart(core, error)
        except EngineDeadError as error:
            if self._over.done():
                return
            self._living.pop(core, None)
            self._gone[core] = EngineDied(core, str(error), error.was_killed, None)
            self._tell_all(self._gone[core])
            if any(self._gone[each].restart_seconds is not None for each in self._gone) or self._living:
                log.error("%s is gone for good: %s", self._name(core), error)
                return
            log.error("the engine has stopped: %s; leaving with exit code %d", error, EXIT_ENGINE_DEAD)
            self._over.set_result(EXIT_ENGINE_DEAD)

    async def _restart(self, core: int, error: EngineDeadError) -> None:
        """Another core for the same front ends, which kept their requests. Raises `error`, or why there is none."""
        engine = self._cores[core]
        if self._over.done() or not engine.can_restart:
            raise error
        began = time.monotonic()
        self._living.pop(core, None)
        wait = "go on in the others" if self._living else "wait for the next"
        log.error("%s died: %s; %d answers %s", self._name(core), error, self._counters.sum(ANSWERS), wait)
        self._gone[core] = EngineDied(core, str(error), error.was_killed, engine.restart_seconds)
        self._tell_all(self._gone[core])
        for front_end in self._front_ends.values():
            self._detach(front_end, core)
        await asyncio.to_thread(engine.restart)
        del self._gone[core]
        self._living[core] = engine
        for front_end in self._front_ends.values():
            self._attach(front_end, core)
        seconds, answers = time.monotonic() - began, self._counters.sum(ANSWERS)
        log.warning("%s is back after %.1f s; %d answers go on", self._name(core), seconds, answers)

    def _name(self, core: int) -> str:
        return "the engine" if len(self._cores) == 1 else f"engine {core}"

    def _end_with(self, error: QuireError) -> None:
        if not self._over.done():
            self._tell_all(Drain(at_once=True))
            self._over.set_exception(error)

    def _ask_for_record(self) -> None:
        for number, core in self._living.items():
            self._recordings[number] = asyncio.create_task(record(core.call_async, self.config, {}))

    def _on_signal(self, number: int) -> None:
        log.info("%s came", signal.Signals(number).name)
        self._tell_all(Drain(at_once=number == signal.SIGINT))
        self._stop.set()

    async def _drain(self) -> None:
        """The front ends let what runs finish, each for itself."""
        await self._all_gone(self.serve.shutdown_grace + self.serve.shutdown_timeout + CLOSE_SECONDS)

    async def _all_gone(self, seconds: float) -> None:
        """Wait until all front ends have ended."""
        try:
            async with asyncio.timeout(seconds):
                while self._front_ends:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.error("%d front ends do not end and are killed", len(self._front_ends))

    async def _give_up(self, starting: asyncio.Task[None]) -> None:
        """Do not wait for a core that nobody needs any more."""
        if not self._cores and self._stop.is_set():
            self._close()
            os._exit(EXIT_OK)  # the thread that reads or fetches the model's files cannot be stopped
        if self._cores and not self._has_loaded:
            for core in self._cores:
                core.kill()
            await asyncio.wait({starting})

    def _close(self) -> None:
        self._stop.set()
        self._timer.cancel()
        for front_end in list(self._front_ends.values()):
            self._forget(front_end)
        for watching in self._watching:
            watching.cancel()
        for core in self._cores:
            core.shutdown()
        self._listener.close()
        if self.serve.uds is not None:
            Path(self.serve.uds).unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
