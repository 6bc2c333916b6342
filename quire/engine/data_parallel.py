"""The client of several cores, each with the whole model: one engine to whoever owns requests.

Requests go where they are best off (`balance.py`) and stay there; questions go to all (`joined_answers.py`). A core
that dies is told of like any death of an engine, but for the requests that it had alone: who owns them sends them
again, to the others, while it is started anew aside.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from quire.config.resolve import Resolved
from quire.engine.balance import Balancer
from quire.engine.joined_answers import JOINS, check_question
from quire.engine.lives import Death
from quire.engine.merged_stats import merge_stats
from quire.engine.messages import EngineInfo
from quire.engine.remote import JoinedClient, ProcessClient
from quire.executor.base import WORKER
from quire.foundation.errors import EngineDeadError
from quire.foundation.log import get_logger
from quire.types.output import ABORTED, EngineOutputs, EngineStats
from quire.types.request import EngineRequest

T = TypeVar("T")
Core = ProcessClient | JoinedClient
_log = get_logger(__name__)
_UP, _DOWN, _GONE = range(3)  # of a core: it runs; another takes its place; none will


class DataParallelClient:
    """cores: started, and nobody else's."""

    def __init__(self, cores: Sequence[Core]) -> None:
        self._cores: list[Core] = list(cores)
        self._states = [_UP] * len(cores)
        self._changed = threading.Condition(threading.RLock())  # guards all that follows
        self._balancer = Balancer(len(cores), self.info)
        self._stats = [EngineStats() for _ in cores]
        self._deaths: deque[tuple[int, Death]] = deque()  # that nobody has been told of
        self._told: tuple[int, Death] | None = None  # the one that somebody has
        self._news: SimpleQueue[tuple[int, EngineOutputs | None]] = SimpleQueue()  # of threads that read
        self._pumps: set[int] = set()  # cores that a thread reads
        self._wake: Callable[[], None] = lambda: None  # whoever reads in `outputs`
        self._is_other = False  # a core has come or gone, and no statistics have told of it
        self._is_shut_down = False
        self._cause = "no engine runs"
        self.owns_engine = all(core.owns_engine for core in cores)

    @classmethod
    def start(cls, resolved: Resolved, worker: str = WORKER) -> DataParallelClient:
        """Start data_parallel_size cores side by side. Raises ConfigError if the model cannot run here."""
        count = resolved.config.runtime.data_parallel_size
        cores: list[ProcessClient] = []
        try:
            cores.extend(ProcessClient(resolved, worker, number=number, wait=False) for number in range(count))
            for core in cores:
                core.wait_until_ready()
        except BaseException:
            for core in cores:
                core.kill()
                core.shutdown()
            raise
        return cls(cores)

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Of the core with the shortest context: what fits there fits anywhere."""
        return min((core.info for core in self._cores), key=lambda info: info.max_model_len)

    @property
    def restart_seconds(self) -> float:
        return max(core.restart_seconds for core in self._cores)

    @property
    def last_heard(self) -> float:
        """Of the most silent core that runs."""
        return min((self._cores[number].last_heard for number in self._living()), default=0.0)

    @property
    def death(self) -> Death | None:
        """Of the core that `poll` or `outputs` has raised for; None if it has not."""
        return None if self._told is None else self._told[1]

    @property
    def can_restart(self) -> bool:
        """Whether there is, or will be, a core."""
        with self._changed:
            if self._is_shut_down:
                return False
            cores = zip(self._states, self._cores, strict=True)
            return any(state == _UP or (state == _DOWN and core.can_restart) for state, core in cores)

    def _living(self) -> list[int]:
        return [number for number, state in enumerate(self._states) if state == _UP]

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, *, again: bool = False, suspect: bool = False) -> None:
        with self._changed:
            living = self._living()
            while living:
                number = self._balancer.choose(request, [request.core] if request.core in living else living)
                try:
                    self._cores[number].add(request, again=again, suspect=suspect)
                    return
                except EngineDeadError:  # which is told in its turn
                    self._balancer.end([request.id])
                    living.remove(number)
            raise EngineDeadError(self._cause)

    def abort(self, request_ids: Sequence[str], reason: str = ABORTED) -> None:
        with self._changed:
            by_core: dict[int, list[str]] = {}
            for request_id in request_ids:
                if (core := self._balancer.core_of(request_id)) is not None:
                    by_core.setdefault(core, []).append(request_id)
            self._balancer.end(request_ids)
        for core, ids in by_core.items():
            self._cores[core].abort(ids, reason)

    # -- questions -----------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        check_question(method)
        asked: list[tuple[int, Future[Any]]] = []
        for number in self._living():
            try:
                asked.append((number, self._cores[number].ask(method, args)))
            except EngineDeadError:
                continue
        answers: dict[int, Any] = {}
        death = EngineDeadError(self._cause)
        for number, question in asked:
            try:
                answers[number] = self._cores[number].answer_to(question, method, timeout)
            except EngineDeadError as error:  # the one that takes its place is as if it had been asked
                death = error
        if not answers:
            raise death
        return self._join(method, answers)

    def _join(self, method: str, answers: dict[int, Any]) -> Any:
        with self._changed:
            if method == "stats":
                for number, answer in answers.items():
                    self._note_stats(number, msgspec.convert(answer, EngineStats))
                return msgspec.to_builtins(self._merged())
            if method == "reset_prefix_cache":
                self._balancer.reset()
        return JOINS[method](answers)

    async def call_async(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(self.call, method, *args)

    def ping(self) -> None:
        for number in self._living():
            try:
                self._cores[number].ping()
            except EngineDeadError:
                continue

    def run_in_worker(self, function: Callable[[Any], T], /) -> T:
        return self._cores[0].run_in_worker(function)

    # -- outputs -------------------------------------------------------------------------------------------------

    def poll(self, timeout: float | None = None) -> EngineOutputs:
        self._raise_death()
        self._start_pumps()
        try:
            number, outputs = self._news.get(timeout=timeout)
        except Empty:
            return EngineOutputs()
        if outputs is None:
            self._bury(number)
            self._raise_death()
            return EngineOutputs()
        return self._note(number, outputs)

    def _start_pumps(self) -> None:
        with self._changed:
            for number in self._living():
                if number not in self._pumps and self._cores[number].death is None:
                    self._pumps.add(number)
                    threading.Thread(target=self._pump, args=(number,), name=f"core-{number}", daemon=True).start()

    def _pump(self, number: int) -> None:
        """Read one core until it is dead."""
        try:
            while True:
                outputs = self._cores[number].poll(None)
                self._news.put((number, outputs))
        except EngineDeadError:
            with self._changed:
                self._pumps.discard(number)
            self._news.put((number, None))

    async def outputs(self) -> AsyncGenerator[EngineOutputs, None]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        detaches: dict[int, Callable[[], None]] = {}

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        self._wake = wake
        try:
            while True:
                news.clear()
                for number in self._living():
                    if number not in detaches:
                        detaches[number] = self._cores[number].read_on_loop(loop, news)
                    try:
                        while (outputs := self._cores[number].take()) is not None:
                            yield self._note(number, outputs)
                    except EngineDeadError:
                        detaches.pop(number)()
                        self._bury(number)
                self._raise_death()
                if self._is_other:
                    yield self._note_change()
                await news.wait()
        finally:
            self._wake = lambda: None
            for detach in detaches.values():
                detach()

    def _note(self, number: int, outputs: EngineOutputs) -> EngineOutputs:
        """What a core tells, as all of them would."""
        with self._changed:
            for output in outputs.special:
                if output.finish_reason is not None:
                    self._balancer.end([output.request_id])
                else:
                    self._balancer.begin(output.request_id)
            if number and outputs.special:
                special = [msgspec.structs.replace(output, engine=number) for output in outputs.special]
                outputs = msgspec.structs.replace(outputs, special=special)
            if outputs.stats is None:
                return outputs
            self._note_stats(number, outputs.stats)
            merged = self._merged()
        merged.engines[number] = msgspec.structs.replace(outputs.stats, queue=None)
        return msgspec.structs.replace(outputs, stats=merged)

    def _note_change(self) -> EngineOutputs:
        with self._changed:
            self._is_other = False
            return EngineOutputs(stats=self._merged())

    def _note_stats(self, number: int, stats: EngineStats) -> None:
        self._balancer.report(number, stats)
        self._stats[number] = stats.counted()

    def _merged(self) -> EngineStats:
        return merge_stats(self._stats, [self._balancer.queue_of(number) for number in self._living()])

    # -- deaths --------------------------------------------------------------------------------------------------

    def _bury(self, number: int) -> None:
        """A core is dead, and all that it said has been read."""
        with self._changed:
            if self._states[number] != _UP:
                return
            self._states[number] = _DOWN
            self._is_other = True
            stats = self._stats[number]
            self._stats[number] = msgspec.structs.replace(
                stats,
                num_running=0,
                num_waiting=0,
                num_seats_used=0,
                num_free_blocks=stats.num_blocks,
                kv_usage=0.0,
                is_up=False,
            )
            death = self._cores[number].death
            assert death is not None
            self._cause = death.cause
            lost = self._balancer.bury(number)
            self._deaths.append((number, replace(death, lost=lost)))

    def _raise_death(self) -> None:
        with self._changed:
            if not self._deaths:
                if self._is_shut_down or all(state == _GONE for state in self._states):
                    raise EngineDeadError(self._cause)
                return
            number, death = self._deaths.popleft()  # others may have died since
            self._told = number, replace(death, others=len(self._living()))
        raise EngineDeadError(self._told[1].cause, was_killed=self._told[1].was_killed)

    def restart(self) -> None:
        """Start the core anew whose death was told. Waits for it only if no other runs."""
        with self._changed:
            if self._told is not None:
                number, death = self._told
                self._told = None
                threading.Thread(target=self._revive, args=(number, death), name=f"restart-{number}").start()
            self._changed.wait_for(lambda: _UP in self._states or _DOWN not in self._states)
            if _UP not in self._states:
                raise EngineDeadError(self._cause)

    def _revive(self, number: int, death: Death) -> None:
        core = self._cores[number]
        stats = EngineStats(is_up=False)
        try:
            core.restart()
            state = _UP
            stats = self._ask_stats(core)
        except EngineDeadError as error:
            state = _GONE
            self._cause = str(error)
            if not self._is_shut_down:
                _log.error("engine %d is gone for good: %s", number, error)
        with self._changed:
            self._states[number] = state
            self._is_other = True
            if state == _UP:
                self._stats[number] = stats
                if death.others and self.owns_engine:
                    _log.warning("engine %d is back", number)
            self._changed.notify_all()
        self._news.put((number, EngineOutputs()))  # whoever polls reads it, too
        self._wake()

    @staticmethod
    def _ask_stats(core: Core) -> EngineStats:
        """What an engine counts on from; it tells by itself only once it has worked."""
        try:
            return msgspec.convert(core.call("stats"), EngineStats)
        except EngineDeadError:
            return EngineStats(is_up=False)  # which is told in its turn

    def shutdown(self) -> None:
        with self._changed:
            self._is_shut_down = True
            self._changed.notify_all()
        for core in self._cores:
            core.stop_reading()
        ends = [threading.Thread(target=core.shutdown) for core in self._cores]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        self._wake()
