"""One protocol for the front end, whether the core lives in this process or in its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from quire.engine.in_process import InProcessClient
from quire.engine.lives import Death
from quire.engine.messages import EngineInfo
from quire.engine.remote import JoinedClient, ProcessClient
from quire.types.output import ABORTED, EngineOutputs
from quire.types.request import EngineRequest

__all__ = ["EngineClient", "EngineInfo", "InProcessClient", "JoinedClient", "ProcessClient"]


T = TypeVar("T")


class EngineClient(Protocol):
    info: EngineInfo
    restart_seconds: float
    """That it will probably take; 0: nobody knows."""
    last_heard: float
    """time.monotonic() of the latest message. With requests unfinished, or a ping, and an old one, the engine hangs."""

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

        again: an engine that died had it; it is not refused for want of room. suspect: several died with it; such
        requests are let in one by one.
        """
        ...

    def restart(self) -> None:
        """Wait for another engine in the place of the dead one, of whose requests it knows nothing.

        For one thread, when all outputs of the dead one have been read. Raises EngineDeadError if there will be none.
        """
        ...

    def abort(self, request_ids: Sequence[str], reason: str = ABORTED) -> None:
        """Stop requests and free what they hold; unknown ids are ignored. No further output comes for them.

        reason: the finish_reason that the core logs.
        """
        ...

    def poll(self, timeout: float | None = None) -> EngineOutputs:
        """The next outputs; empty if there are none within `timeout` seconds. Raises EngineDeadError."""
        ...

    def outputs(self) -> AsyncGenerator[EngineOutputs, None]:
        """All outputs from now on, for one asyncio task. Raises EngineDeadError. Ends with `aclose()`."""
        ...

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """A utility of the core: "stats", "reset_prefix_cache", "check", "drain", "ping", "profile", "worker".

        Waits for the answer, plain data. Raises what the utility raised, TimeoutError after `timeout` seconds.
        """
        ...

    def run_in_worker(self, function: Callable[[Any], T], /) -> T:
        """What `function` makes of the worker (`quire.worker.worker.Worker`), in this process: any object.

        Raises what it raises, and InputError if the worker is not in this process.
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
