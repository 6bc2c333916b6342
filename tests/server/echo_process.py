"""`quire serve` in front of the echo engine: the real command, process and signals, an engine that starts at once.

    python -m tests.server.echo_process [serve options]

ECHO_DELAY: seconds a token. ECHO_START: seconds to load. ECHO_FAIL: refuse to load. SIGUSR1 kills the engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.engine import early
from quire.foundation.errors import ConfigError, DoesNotFitError
from quire.frontend.async_engine import AsyncLLM
from tests.server.echo_llm import EchoLLM


async def start(config: EngineConfig, serving: bool = False, clock: Any = None) -> Any:
    assert serving
    assert clock is not None
    assert config.schedule.max_num_queued_reqs == 4096
    await asyncio.sleep(float(os.environ.get("ECHO_START", "0")))
    if failure := os.environ.get("ECHO_FAIL"):
        raise DoesNotFitError("the weights need 3 GiB more") if failure == "memory" else ConfigError("no such model")
    llm = EchoLLM(delay=float(os.environ.get("ECHO_DELAY", "0")))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, llm.die)
    return llm


early.begin = lambda _: None  # no core is to come
AsyncLLM.start = start  # type: ignore[method-assign,assignment]
sys.exit(main(["serve", *sys.argv[1:]]))
