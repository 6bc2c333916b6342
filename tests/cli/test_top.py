"""`quire top` on a server that works, and its arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from quire.cli.main import main
from quire.cli.top import Look, Screen, quantile, sparkline
from tests.server.conftest import Served, echo_server
from tests.server.echo_llm import EchoLLM


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with echo_server(EchoLLM(delay=0.001, served_model_name=["echo"]), keys=("secret",)) as server:
        yield server


def test_it_shows_what_happens_meanwhile(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    def ask() -> None:
        for _ in range(3):
            httpx.post(
                f"{served.url}/v1/completions",
                json={"prompt": "abcdef", "max_tokens": 20},
                headers={"authorization": "Bearer secret"},
                timeout=60,
            ).raise_for_status()

    asking = threading.Thread(target=ask)
    begin = threading.Timer(0.2, asking.start)
    begin.start()
    assert main(["top", "--url", served.url, "--api-key", "secret", "--once", "--interval", "3"]) == 0
    begin.join()
    asking.join()
    shown = capsys.readouterr().out
    assert "echo" in shown
    assert "length 3" in shown
    assert "nothing in this interval" not in next(line for line in shown.splitlines() if "first token" in line)


def test_it_says_what_is_wrong(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", served.url, "--once"]) == 2
    assert "401" in capsys.readouterr().err
    assert main(["top", "--url", served.url, "--interval", "0"]) == 2
    assert "interval must be > 0" in capsys.readouterr().err


def test_several_cores_have_a_line_each() -> None:
    def at(when: float, tokens: float) -> Look:
        values = [
            ("vllm:engine_healthy", "0", 1.0), ("vllm:engine_healthy", "1", 0.0),
            ("vllm:num_requests_running", "0", 3.0), ("vllm:num_requests_waiting", "1", 2.0),
            ("vllm:kv_cache_usage_perc", "0", 0.9), ("vllm:kv_cache_usage_perc", "1", 0.3),
            ("vllm:generation_tokens_total", "0", tokens),
        ]  # fmt: skip
        return Look(when, {(name, frozenset({("engine", core)})): value for name, core, value in values})

    rows = dict(Screen("t", at(0.0, 10.0))._rows(at(2.0, 50.0)))
    assert rows["core 0"] == "3 running, 0 waiting, 20 tokens/s, KV cache 90%"
    assert "being started again" in rows["core 1"]
    assert "60%" in rows["KV cache"]  # of both together, and never more than all of it


def look(*counts: float) -> Look:
    bounds = ("0.1", "0.2", "0.4", "+Inf")
    return Look(0.0, {("x_bucket", frozenset({("le", b)})): c for b, c in zip(bounds, counts, strict=True)})


@pytest.mark.parametrize(
    ("before", "now", "share", "value"),
    [
        (look(0, 0, 0, 0), look(10, 10, 10, 10), 0.5, 0.05),
        (look(0, 0, 0, 0), look(0, 10, 10, 10), 0.5, 0.15),
        (look(7, 7, 7, 7), look(7, 7, 17, 17), 0.9, 0.38),
        (look(0, 0, 0, 0), look(0, 0, 0, 5), 0.5, 0.4),
        (look(3, 3, 3, 3), look(3, 3, 3, 3), 0.5, None),
    ],
)
def test_quantiles_are_those_of_the_interval(before: Look, now: Look, share: float, value: float | None) -> None:
    assert quantile(before, now, "x", share) == (None if value is None else pytest.approx(value))


def test_a_line_of_sparks() -> None:
    assert sparkline([0, 4, 8]) == " ▄█"
    assert sparkline([0, 0]) == "  "
