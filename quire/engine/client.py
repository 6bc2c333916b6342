"""One protocol for the front end, whether the core lives in this process or in its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.config.resolve import Resolved
from quire.types.kv import WorkerReport
from quire.types.output import EngineOutputs
from quire.types.request import EngineRequest


@dataclass(frozen=True)
class EngineInfo:
    """What the front end must know of a started engine."""

    resolved: Resolved
    report: WorkerReport

    @property
    def max_model_len(self) -> int:
        return self.report.max_model_len


class EngineClient(Protocol):
    info: EngineInfo

    def add(self, request: EngineRequest) -> None:
        """Queue a request. One that can never run comes back as an output with finish_reason 'error'."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests and free what they hold; unknown ids are ignored. No further output comes for them."""
        ...

    def poll(self, timeout: float | None = None) -> EngineOutputs:
        """The next outputs; empty if there are none within `timeout` seconds. Raises EngineDeadError."""
        ...

    def call(self, method: str, *args: Any) -> Any:
        """A utility of the core: "stats", "reset_prefix_cache", "check" …"""
        ...

    def shutdown(self) -> None: ...
