"""One protocol for the front end, whether the core lives in this process or in its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from quire.config.resolve import Resolved
from quire.engine.data_parallel import DataParallelClient
from quire.engine.in_process import InProcessClient
from quire.engine.lives import Death
from quire.engine.messages import EngineInfo
from quire.engine.remote import JoinedClient, ProcessClient
from quire.executor.base import WORKER
from quire.types.output import ABORTED, EngineOutputs
from quire.types.request import EngineRequest

__all__ = [
    "DataParallelClient",
    "EngineClient",
    "EngineInfo",
    "InProcessClient",
    "JoinedClient",
    "ProcessClient",
    "start_here",
    "start_process",
]


T = TypeVar("T")


class EngineClient(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    owns_engine: bool
    """Whether this client has started the engine; else somebody else tells of its deaths."""

    @property
    def restart_seconds(self) -> float:
        """That it will probably take; 0: nobody knows."""
        ...

    @property
    def last_heard(self) -> float:
        """time.monotonic() of the latest message. With requests unfinished, or a ping, and an old one, the engine
        hangs."""
        ...

    @property
    def death(self) -> Death | None:
        """How the engine ended; None while it lives."""
        ...

    @property
    def can_restart(self) -> bool:
        """Whether another engine may take the place of this one."""
        ...

    def add(self, request: EngineRequest, *, again: bool = False, suspect: bool = False) -> None:
        """Queue a request. One that can never run comes back as an output with finish_reason 'error'.

        Args:
            request: its id is of none that runs. Of several cores it goes to the one that it names, while that lives.
            again: an engine that died had it; it is not refused for want of room.
            suspect: several died with it; such requests are let in one by one.
        """
        ...

    def restart(self) -> None:
        """Wait for another engine in the place of the dead one, of whose requests it knows nothing.

        Not for two threads. All outputs of the dead one must have been read.

        Raises:
            EngineDeadError: there will be no other.
        """
        ...

    def abort(self, request_ids: Sequence[str], reason: str = ABORTED) -> None:
        """Stop requests and free what they hold. No further output comes for them.

        Args:
            request_ids: unknown ones are ignored.
            reason: the finish_reason that the core logs.
        """
        ...

    def poll(self, timeout: float | None = None) -> EngineOutputs:
        """The next outputs.

        Args:
            timeout: seconds, after which there may be none; None: as long as it takes.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        ...

    def outputs(self) -> AsyncGenerator[EngineOutputs, None]:
        """All outputs from now on, for one asyncio task. Ends with `aclose()`.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        ...

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a utility of the core and wait for the answer.

        Args:
            method: "stats", "reset_prefix_cache", "check", "drain", "ping", "look", "life", "record", "profile",
                "workers"; "worker" of one core alone. What several answer is joined (`joined_answers.py`).
            *args: of the call.
            timeout: seconds; None: as long as it takes.

        Returns:
            Plain data.

        Raises:
            TimeoutError: there was no answer in time. What the utility raised is raised as well.
        """
        ...

    def run_in_worker(self, function: Callable[[Any], T], /) -> T:
        """What `function` makes of the worker (`quire.worker.worker.Worker`), in this process: any object.

        Raises:
            InputError: the worker is not in this process. What `function` raised is raised as well.
        """
        ...

    def ping(self) -> None:
        """Ask the core, and an idle worker, for a sign of life, without waiting: the answer moves `last_heard` on."""
        ...

    async def call_async(self, method: str, *args: Any) -> Any:
        """`call` for an event loop, whether or not it reads `outputs()`."""
        ...

    def shutdown(self) -> None:
        """End the core. Call it from the thread that reads the outputs, or when nobody does."""
        ...


def start_process(resolved: Resolved, worker: str = WORKER) -> EngineClient:
    """Start the engine in a process of its own, or in as many as data_parallel_size says.

    Raises:
        ConfigError: the model cannot run here.
    """
    several = resolved.config.runtime.data_parallel_size > 1
    return DataParallelClient.start(resolved, worker) if several else ProcessClient(resolved, worker)


def start_here(resolved: Resolved, worker: str = WORKER) -> EngineClient:
    """Start the engine in this process; several have processes of their own.

    Raises:
        ConfigError: the model cannot run here.
    """
    several = resolved.config.runtime.data_parallel_size > 1
    return DataParallelClient.start(resolved, worker) if several else InProcessClient(resolved, worker)
