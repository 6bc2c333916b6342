"""SIGUSR1: the flight record of a server that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from quire.config.engine import EngineConfig
from quire.foundation.errors import QuireError
from quire.foundation.log import get_logger
from quire.observe.flight_record import record_folder, write_record

CAUSE = "SIGUSR1"
PATIENCE = 5.0  # seconds
log = get_logger(__name__)


async def record(call: Callable[..., Awaitable[Any]], config: EngineConfig, details: dict[str, Any]) -> None:
    """call: of the engine's utilities. If it does not answer, what is known here is written."""
    try:
        path = await asyncio.wait_for(call("record", CAUSE, details), PATIENCE)
    except (TimeoutError, QuireError) as error:
        problem = f"the engine gives no answer: {error or type(error).__name__}"
        path = write_record(
            record_folder(config.observe.flight_record_dir), f"{CAUSE}; {problem}", {"details": details}
        )
    if path is not None:
        log.info("the flight record is in %s", path)
