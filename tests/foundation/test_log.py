from __future__ import annotations

import json
import logging

import pytest

from quire.foundation import env
from quire.foundation.errors import ConfigError
from quire.foundation.log import JsonFormatter, TextFormatter, get_logger, setup


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger("quire")
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("quire.engine.core", logging.INFO, "f.py", 1, message, args, None)
    vars(made).update(extra)
    return made


def test_user_text_cannot_forge_a_line() -> None:
    line = TextFormatter().format(record("request %s came", "a\n12:00:00 ERROR forged\x1b[31m", request_id="x\ny"))
    assert "\n" not in line
    assert "\x1b" not in line
    assert r"a\n12" in line
    assert line.endswith(r"request_id=x\ny")
    assert " INFO engine.core: request" in line


def test_json_lines_carry_the_fields_of_the_event() -> None:
    of_another = {"_ray_timestamp_ns": 1}  # that a library gives every record
    event = json.loads(JsonFormatter().format(record("step %d", 3, request_id="r-1", seconds=0.5, **of_another)))
    assert event["message"] == "step 3"
    assert event["level"] == "info"
    assert event["request_id"] == "r-1"
    assert event["seconds"] == 0.5
    assert "args" not in event
    assert not [name for name in event if name.startswith("_")]


def test_levels_and_format_come_from_option_and_environment(monkeypatch, capfd) -> None:
    setup("warning")
    get_logger("quire.x").info("quiet")
    get_logger("quire.x").warning("loud")
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "debug")
    monkeypatch.setenv("QUIRE_LOG_JSON", "1")
    setup("warning")
    get_logger("x").debug("deep")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("x: loud")
    assert json.loads(lines[1])["message"] == "deep"


def test_a_bad_variable_is_one_clear_error(monkeypatch) -> None:
    monkeypatch.setenv("QUIRE_LOG_JSON", "perhaps")
    with pytest.raises(ConfigError, match=r"QUIRE_LOG_JSON='perhaps': must be 0 or 1"):
        env.LOG_JSON.get()
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="QUIRE_LOG_LEVEL"):
        env.LOG_LEVEL.get()


def test_variables_are_documented_and_have_one_prefix() -> None:
    assert all(v.name.startswith("QUIRE_") and v.doc for v in env.VARIABLES)
    assert len({v.name for v in env.VARIABLES}) == len(env.VARIABLES) <= 12
