"""What both clients share: how requests go out and how answers find those who wait for them."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from quire.config.resolve import Resolved
from quire.engine.lives import Death
from quire.engine.messages import (
    Abort,
    Aborted,
    Add,
    EngineInfo,
    FromCore,
    News,
    Suspects,
    ToCore,
    Trial,
    UtilityCall,
    UtilityReply,
)
from quire.engine.stat_loggers import StatLoggers
from quire.foundation.child import Failure
from quire.foundation.errors import EngineDeadError, QuireError
from quire.types.output import ABORTED, EngineOutputs, EngineStats
from quire.types.request import EngineRequest

LAST_STATS_SECONDS = 1.0  # that the end of an engine waits for its last statistics


class ClientBase(ABC):
    """What both clients share: outputs wait in a deque, answers find their callers, one thread at a time reads.

    Any thread may add, abort and call. Whoever waits for something reads the messages for all; the others sleep until
    it has news for them.
    """

    info: EngineInfo
    owns_engine = True  # this client has started it

    def __init__(self, resolved: Resolved | None = None, number: int = 0) -> None:
        """resolved: of an engine that this client starts, and whose statistics it has logged, and its number where
        there are several. Raises ConfigError."""
        self._loggers = None if resolved is None else StatLoggers(resolved, number)
        if self._loggers is not None:
            weakref.finalize(self, self._loggers.close)  # for who forgets to shut the engine down
        self._lock = threading.Condition()
        self._reading = False
        self._calls: dict[int, Future[Any]] = {}
        self._num_calls = 0
        self._last_stats: EngineStats | None = None
        self._begin()

    def _begin(self) -> None:
        """A core begins, of which nothing has been heard."""
        self._waiting_outputs: deque[EngineOutputs] = deque()
        self._ids: list[str] = []  # of the latest message that had any
        # Aborts that the core has not confirmed: outputs it sent before it knew are dropped.
        self._aborted: Counter[str] = Counter()
        self._dead: EngineDeadError | None = None
        self._served = False  # somebody got something of it
        self._suspects: Suspects | None = None
        self._on_trial: str | None = None
        self.last_heard = time.monotonic()

    @abstractmethod
    def _send(self, message: ToCore) -> None: ...

    @abstractmethod
    def _receive(self, timeout: float | None) -> Sequence[FromCore]:
        """Messages of the core, waiting up to `timeout` seconds for the first. Raises EngineDeadError."""

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, *, again: bool = False, suspect: bool = False) -> None:
        self._raise_if_dead()
        self._send(Add(request, again, suspect))

    def abort(self, request_ids: Sequence[str], reason: str = ABORTED) -> None:
        ids = list(request_ids)
        if not ids or self._dead is not None:
            return
        with self._lock:
            self._aborted.update(ids)
            self._waiting_outputs = deque(self._without_aborted(outputs) for outputs in self._waiting_outputs)
        self._send(Abort(ids, reason))

    def poll(self, timeout: float | None = None) -> EngineOutputs:
        self._read_until(lambda: bool(self._waiting_outputs), timeout)
        with self._lock:
            if self._waiting_outputs:
                return self._waiting_outputs.popleft()
        self._raise_if_dead()
        return EngineOutputs()

    # -- utilities -----------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        return self.answer_to(self.ask(method, args), method, timeout)

    def answer_to(self, question: Future[Any], method: str, timeout: float | None) -> Any:
        """Of `ask`, waiting for it as `call` does."""
        self._read_until(question.done, timeout)
        if not question.done():
            question.cancel()
            raise TimeoutError(f"the engine has not answered {method!r} within {timeout} s")
        return question.result()

    async def call_async(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(self.answer_to, self.ask(method, args), method, None)

    def ping(self) -> None:
        """Ask for a sign of life, without waiting for it: once it is there and read, `last_heard` says so."""
        self.ask("ping", ())

    def stats(self) -> EngineStats:
        return msgspec.convert(self.call("stats"), EngineStats)

    def ask(self, method: str, args: Sequence[Any]) -> Future[Any]:
        """`call` without waiting for the answer."""
        self._raise_if_dead()
        answer: Future[Any] = Future()
        with self._lock:
            self._num_calls += 1
            number = self._num_calls
            self._calls[number] = answer
        self._send(UtilityCall(number, method, list(args)))
        return answer

    # -- reading -------------------------------------------------------------------------------------------------

    def _read_until(self, ready: Callable[[], bool], timeout: float | None) -> None:
        """Return when `ready()`, after `timeout` seconds or when the core is dead."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not ready() and self._dead is None:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if self._reading:
                    self._lock.wait(left)
                else:
                    self._read(left)
                if left == 0:
                    return

    def _read(self, timeout: float | None) -> None:
        """Read once, with the lock let go meanwhile."""
        self._reading = True
        self._lock.release()
        messages: Sequence[FromCore] = ()
        death: EngineDeadError | None = None
        try:
            messages = self._receive(timeout)
        except EngineDeadError as error:
            death = error
        finally:
            self._lock.acquire()
            self._reading = False
            self._take(messages, death)

    def _take(self, messages: Sequence[FromCore], death: EngineDeadError | None = None) -> None:
        for message in messages:
            match message:
                case News(outputs):
                    self._note(outputs)
                    if outputs.ids is None:
                        outputs = msgspec.structs.replace(outputs, ids=self._ids)
                    elif outputs.ids:
                        self._ids = outputs.ids
                    self._waiting_outputs.append(self._without_aborted(outputs))
                case Aborted(ids):
                    self._aborted -= Counter(ids)
                case UtilityReply(number, value, failure):
                    answer = self._calls.pop(number, None)
                    if answer is None or not answer.set_running_or_notify_cancel():
                        continue
                    if failure is None:
                        answer.set_result(value)
                    else:
                        answer.set_exception(failure.error())
                case Trial(request_id):
                    self._on_trial = request_id
                case Suspects():
                    self._suspects = message
                case Failure():
                    death = EngineDeadError(message.message)
        if messages:
            self.last_heard = time.monotonic()
        if death is not None:
            self._die(death)
        self._lock.notify_all()

    def _count_restart(self) -> None:
        before = self._last_stats or EngineStats()
        self._last_stats = msgspec.structs.replace(before, num_restarts=before.num_restarts + 1)

    def _note(self, outputs: EngineOutputs) -> None:
        stats, before = outputs.stats, self._last_stats
        if outputs.tokens or outputs.special:
            self._served = True
        if stats is not None:
            self._last_stats = stats
            if self._loggers is not None:
                self._loggers.take(stats)
            if before is None or _num_tokens(stats) > _num_tokens(before):
                self._served = True  # others, perhaps

    def _end_loggers(self) -> None:
        """To be called while the engine can still be asked."""
        if self._loggers is None:
            return
        stats = None
        if self._loggers.wants_end and self._dead is None:
            try:
                stats = msgspec.convert(self.call("stats", timeout=LAST_STATS_SECONDS), EngineStats)
            except (QuireError, TimeoutError):
                pass  # what it told last will do
        self._loggers.close(stats)

    @property
    def death(self) -> Death | None:
        """What is known of how the engine ended; None while it lives."""
        if self._dead is None:
            return None
        told = self._suspects
        if told is None:
            return Death(str(self._dead), None, self._dead.was_killed, self._on_trial)
        return Death(str(self._dead), frozenset(told.ids), told.was_killed, self._on_trial)

    def _without_aborted(self, outputs: EngineOutputs) -> EngineOutputs:
        if not self._aborted:
            return outputs
        gone = self._aborted.keys()
        special = [output for output in outputs.special if output.request_id not in gone]
        ids, tokens, counts = outputs.ids or [], outputs.tokens, outputs.counts
        if not gone.isdisjoint(ids):
            kept = [i for i, request_id in enumerate(ids) if request_id not in gone]
            ids = [ids[i] for i in kept]
            if counts is None:
                tokens = [tokens[i] for i in kept]
            else:
                parts = outputs.column
                tokens, counts = [token for i in kept for token in parts[i]], [counts[i] for i in kept]
        return EngineOutputs(ids=ids, tokens=tokens, counts=counts, special=special, stats=outputs.stats)

    def _die(self, error: EngineDeadError) -> None:
        if self._dead is None:
            self._dead = error
        while self._calls:
            _, answer = self._calls.popitem()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead), was_killed=self._dead.was_killed)


def _num_tokens(stats: EngineStats) -> int:
    return stats.prompt_tokens + stats.generation_tokens
