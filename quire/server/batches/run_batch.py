"""The requests of a file answered without a server: the server's own endpoints, asked in this process."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

from quire.config.engine import EngineConfig
from quire.config.run_batch import RunBatchConfig
from quire.config.serve import ServeConfig
from quire.foundation.errors import ConfigError
from quire.foundation.log import get_logger, setup
from quire.server.app import build_app
from quire.server.batches.journal import Journal
from quire.server.batches.lines import LineRunner, count_lines
from quire.server.batches.queue import ENDPOINTS
from quire.server.service import Service

log = get_logger(__name__)

SCORING = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/pooling", "/classify", "/v2/embed")
REPORT_SECONDS = 10.0


def run_batch(config: EngineConfig, serve: ServeConfig, files: RunBatchConfig) -> int:
    """Returns the exit code: 0 if every line has a result, which may be a failure; 130 if it was interrupted.

    Raises ConfigError for files that cannot be used.
    """
    source, target = Path(files.input_file), Path(files.output_file)
    for name, path in (("input_file", files.input_file), ("output_file", files.output_file)):
        if not path or "://" in path:
            raise ConfigError(f"{name} must be the path of a file, got {path!r}", name)
        if Path(path).exists() and not Path(path).is_file():  # a pipe would end after the first look, or never
            raise ConfigError(f"{name} {path!r} is read more than once: it must be a file on a disk", name)
    try:
        total = count_lines(source)
    except OSError as error:
        raise ConfigError(f"input_file {str(source)!r} cannot be read: {error.strerror}", "input_file") from None
    if target.exists() and target.samefile(source):
        raise ConfigError("output_file must be another file than input_file", "output_file")
    setup(config.observe.log_level)
    try:
        journal = Journal(target, target)
    except OSError as error:
        raise ConfigError(f"output_file {str(target)!r} cannot be written: {error.strerror}", "output_file") from None
    try:
        finished = asyncio.run(_run(config, serve, source, journal, total))
    finally:
        journal.close()
    counts = journal.counts
    print(f"{total} requests: {counts.completed} answered, {counts.failed} failed; see {target}", flush=True)
    return 0 if finished else 130


async def _run(config: EngineConfig, serve: ServeConfig, source: Path, journal: Journal, total: int) -> bool:
    """Whether it came to the end; False after a signal."""
    from quire.frontend.async_engine import AsyncLLM

    engine = await AsyncLLM.start(config)
    try:
        service = Service(config, serve)
        service.attach(engine)
        lines = LineRunner(build_app(service), service, ENDPOINTS + SCORING, 2 * engine.info.resolved.max_num_seqs)
        work = asyncio.create_task(lines.run(source, journal))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        started = time.monotonic()
        while not (await asyncio.wait((work,), timeout=REPORT_SECONDS))[0]:
            log.info(
                "%d of %d after %.0f s", journal.counts.completed + journal.counts.failed, total,
                time.monotonic() - started,
            )  # fmt: skip
        if work.cancelled():
            return False
        work.result()
        return True
    finally:
        engine.shutdown()
