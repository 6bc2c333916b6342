"""Who is told the statistics of an engine, when, and what happens if that goes wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

import quire
from quire.config.engine import EngineConfig
from quire.engine.client import EngineClient, InProcessClient, ProcessClient
from quire.engine.stat_loggers import StatLoggers
from quire.foundation.errors import ConfigError
from quire.observe.stat_logger import StatLogger, StatLoggerSetup
from quire.types.output import EngineStats
from tests.engine.echo_worker import NAME, make_request, make_resolved
from tests.server.process import PATIENCE

ROOT = Path(__file__).parents[2]
HERE = "tests.engine.test_stat_loggers"
DEMO: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 96, "use_tqdm_on_load": False}


class Kept(StatLogger):
    """Keeps what it is told, in the process that has started the engine."""

    interval = 10.0
    made: ClassVar[list[Kept]] = []

    def __init__(self, setup: StatLoggerSetup) -> None:
        super().__init__(setup)
        self.records: list[EngineStats] = []
        self.num_closed = 0
        self.made.append(self)

    def record(self, stats: EngineStats) -> None:
        assert not self.num_closed
        self.records.append(msgspec.structs.replace(stats))

    def close(self) -> None:
        self.num_closed += 1


class Often(Kept):
    interval = 0.0


class Fails(Kept):
    interval = 0.0

    def record(self, stats: EngineStats) -> None:
        super().record(stats)
        raise ZeroDivisionError("the disk is full")

    def close(self) -> None:
        raise OSError("and it stays full")


class CannotBeMade(Kept):
    def __init__(self, setup: StatLoggerSetup) -> None:
        raise FileNotFoundError(setup.model_name)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    Kept.made.clear()
    yield
    Kept.made.clear()


def resolved(*loggers: str | type, **options: Any) -> Any:
    made = make_resolved(**options)
    flat = EngineConfig.from_python(stat_loggers=list(loggers), disable_log_stats=True)
    return dataclasses.replace(made, config=dataclasses.replace(made.config, observe=flat.observe))


def busy(tokens: int) -> EngineStats:
    return EngineStats(num_running=1, generation_tokens=tokens)


def test_records_come_once_an_interval_at_rest_and_at_the_end() -> None:
    loggers = StatLoggers(resolved(Kept, Often))
    kept, often = Kept.made
    assert kept.setup == StatLoggerSetup(kept.setup.model_name, "cpu", kept.setup.max_num_seqs)
    for tenth in range(250):
        loggers.take(busy(tenth), now=100 + tenth / 10)
    assert [stats.generation_tokens for stats in kept.records] == [0, 100, 200]
    assert len(often.records) == 250
    loggers.take(EngineStats(generation_tokens=250), now=125.0)  # nothing runs any more
    assert kept.records[-1].generation_tokens == 250
    for _ in range(2):
        loggers.close(EngineStats(generation_tokens=251))
    assert [one.records[-1].generation_tokens for one in (kept, often)] == [251, 251]
    assert [one.num_closed for one in (kept, often)] == [1, 1]


def test_one_that_fails_is_told_nothing_any_more_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    loggers = StatLoggers(resolved(Fails, Often))
    fails, often = Kept.made
    for tokens in range(3):
        loggers.take(busy(tokens), now=float(tokens))
    assert (len(fails.records), len(often.records)) == (1, 3)
    assert caplog.text.count("the stat logger Fails failed and is told nothing any more") == 1
    assert "ZeroDivisionError: the disk is full" in caplog.text
    loggers.close()
    assert often.num_closed == 1


def test_one_that_does_not_close_keeps_no_other_from_closing(caplog: pytest.LogCaptureFixture) -> None:
    loggers = StatLoggers(resolved(Fails, Often))
    loggers.close()  # nothing was told, so nothing is recorded
    assert Kept.made[1].num_closed == 1
    assert "the stat logger Fails did not close" in caplog.text


@pytest.mark.parametrize(
    ("logger", "words"),
    [
        ("not_installed", r"unknown stat logger 'not_installed' \(known: log, or a path"),
        ("no.such.module:Thing", "there is no module"),
        (f"{HERE}:Missing", "has no 'Missing'"),
        ("json:JSONDecoder", "no stat logger: the class JSONDecoder lacks record, close, interval"),
        (f"{HERE}:CannotBeMade", "cannot be made: FileNotFoundError"),
        (3, "must hold classes or names of classes"),
    ],
)
def test_they_are_checked_before_the_engine_starts(logger: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        quire.LLM(stat_loggers=[logger], **DEMO)
    assert caught.value.field == "stat_loggers"


@pytest.mark.parametrize("kind", [InProcessClient, ProcessClient])
def test_whoever_starts_an_engine_has_its_loggers(kind: type) -> None:
    client: EngineClient = kind(resolved(Often), NAME)
    (logger,) = Kept.made
    client.add(make_request("a", [1, 2, 3], 10))
    while not any(output.finish_reason for output in client.poll(10).each()):
        pass
    client.shutdown()
    assert logger.records[-1].generation_tokens == 10
    assert logger.records[-1].prompt_tokens == 3
    assert logger.num_closed == 1


def test_an_engine_that_is_dropped_closes_them() -> None:
    client = InProcessClient(resolved(Kept), NAME)
    (logger,) = Kept.made
    del client
    gc.collect()
    assert logger.num_closed == 1


def test_llm_and_async_llm_take_classes_and_paths() -> None:
    params = quire.SamplingParams(max_tokens=4, ignore_eos=True)
    with quire.LLM(stat_loggers=[Kept, f"{HERE}:Often"], **DEMO) as llm:
        llm.generate([[1, 2, 3]], params, use_tqdm=False)

    async def ask() -> None:
        engine = quire.AsyncLLM.from_engine_args(quire.EngineArgs(stat_loggers=[Kept], **DEMO))
        async for _ in engine.generate({"prompt_token_ids": [1, 2, 3]}, params, "a"):
            pass
        engine.shutdown()

    asyncio.run(ask())
    assert [(one.records[-1].prompt_tokens, one.records[-1].generation_tokens) for one in Kept.made] == [(3, 4)] * 3
    assert [one.num_closed for one in Kept.made] == [1] * 3
    assert [one.setup.model_name for one in Kept.made] == ["quire-demo"] * 3


def test_the_line_is_one_of_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")
    quiet = StatLoggers(resolved())
    both = dataclasses.replace(make_resolved())
    line = StatLoggers(both)
    assert (quiet.wants_end, line.wants_end) == (False, False)
    (logger,) = line._due
    logger.record(busy(0))
    logger._line._last_report -= 5  # type: ignore[attr-defined]
    logger._line._window_start -= 10  # type: ignore[attr-defined]
    logger.record(busy(100))
    assert "generation 10.0 tokens/s" in caplog.text


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0].replace("stat_loggers=", "device='cpu', stat_loggers=")
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True,
        text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *lines, end = done.stdout.splitlines()
    assert end == "the end"
    assert lines[-1].split()[:2] == ["0", "0"]
    assert int(lines[-1].split()[-1]) > 0
