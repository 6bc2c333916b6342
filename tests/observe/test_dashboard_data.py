"""What the dashboard is told: percentiles, rows of history, GPUs, use by key, and who may see a request's text."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import httpx
import pytest

from quire.config.serve import ServeConfig
from quire.frontend.ended import MAX_TOKENS, Ended
from quire.server.dashboard.endpoints import STATIC
from quire.server.dashboard.gpu import Gpus, read
from quire.server.dashboard.history import History, percentiles
from quire.server.dashboard.others import may_read
from quire.server.http.auth import name_keys
from quire.server.http.trail import NO_KEY, Trail, Trails
from quire.server.http.usage import MAX_NAMES, OTHERS, KeyUsage
from quire.server.processes.shared_counters import SharedCounters
from quire.types.output import EngineStats
from tests.server.conftest import echo_server
from tests.server.process import wait_until

SMI = "NVIDIA H200, 81234, 143771, 512.31, 1980, 97, 61\nNVIDIA H200, 10, 143771, [N/A], 345, 0, 30\n"


def test_percentiles_lie_where_the_values_are() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert percentiles(bounds, [0, 0, 0, 0]) == (None, None, None)
    assert percentiles(bounds, [0, 100, 0, 0], (0.5, 1.0)) == (1.5, 2.0)
    assert percentiles(bounds, [50, 0, 50, 0], (0.5, 0.75)) == (1.0, 3.0)
    assert percentiles(bounds, [0, 0, 0, 7]) == (4.0, 4.0, 4.0)  # behind the last bound: at least there


def test_history_has_a_row_a_second_with_rates_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with echo_server() as served:
        metrics = served.service.metrics
        assert metrics is not None
        now = 100.0
        monkeypatch.setattr("quire.server.dashboard.history.time.monotonic", lambda: now)
        history = History(metrics)
        history.note(EngineStats(generation_tokens=10, num_draft_tokens=4, num_accepted_tokens=1))
        now = 100.4
        history.note(EngineStats(generation_tokens=20))  # too soon
        for _ in range(3):
            metrics.first_token.observe(0.05)
        metrics.refuse("queue_full")
        now = 102.0
        history.note(
            EngineStats(generation_tokens=50, num_running=3, kv_usage=0.25, num_draft_tokens=8, num_accepted_tokens=4)
        )
        [row] = history.after(0.0)
        assert (row.generation_rate, row.running, row.kv_usage, row.accepted) == (20.0, 3, 0.25, 0.75)
        assert row.refused_rate == 0.5
        assert row.first_token[0] is not None
        assert 0.04 <= row.first_token[0] <= 0.06
        assert row.gap == (None, None, None)
        assert history.after(row.time) == []


def test_gpus_are_what_their_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = read(SMI)
    assert (first.name, first.memory_used, first.power, first.clock) == ("NVIDIA H200", 81234.0, 512.31, 1980.0)
    assert second.power is None
    assert read("NVIDIA-SMI has failed because it couldn't communicate\n") == []
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{SMI}'\n".replace("\n'", "'").replace("\nNVIDIA", "\\nNVIDIA"))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [gpu.memory_used for gpu in asyncio.run(Gpus().look())] == [81234.0, 10.0]
    assert asyncio.run(Gpus("no-such-program").look()) == []


def test_keys_have_names_and_counts() -> None:
    assert name_keys(["a", "b # ann", "c#d"]) == [("a", "key-1"), ("b", "ann"), ("c#d", "key-3")]
    usage = KeyUsage(SharedCounters(), [f"key-{i}" for i in range(100)])
    assert len(usage.names) == MAX_NAMES
    for key in ("key-3", "key-99", NO_KEY):
        usage.count(Trail("POST", "/", key=key, status=400, prompt_tokens=5, cached_tokens=2, output_tokens=1))
    assert usage.totals()["key-3"] == {
        "requests": 1, "failures": 1, "prompt_tokens": 5, "cached_tokens": 2, "generation_tokens": 1}  # fmt: skip
    assert usage.totals()[OTHERS]["requests"] == 2


def test_a_named_key_is_the_key_without_its_name() -> None:
    with echo_server(keys=("sesame # ann",)) as served:

        def status(key: str) -> int:
            return served.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

        assert [status(key) for key in ("sesame", "sesame # ann", "ann", "x")] == [200, 401, 401, 401]
        assert served.service.http_metrics is not None
        wait_until(lambda: served.service.http_metrics.usage.totals()[NO_KEY]["requests"] == 3)  # type: ignore[union-attr]
        totals = served.service.http_metrics.usage.totals()
        assert (totals["ann"]["requests"], totals[NO_KEY]["failures"]) == (1, 3)


def test_only_the_bare_page_is_open() -> None:
    with echo_server(keys=("sesame",)) as served:
        client = served.client
        for file in STATIC.rglob("*.js"):
            reply = client.get(f"/dashboard/static/{file.relative_to(STATIC)}")
            assert (reply.status_code, reply.content) == (200, file.read_bytes())
        page = client.get("/dashboard")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert client.get("/dashboard/door").json() == {"is_open": False}
        assert client.get("/dashboard/door", headers={"x-api-key": "sesame"}).json() == {"is_open": True}
        closed = ["/dashboard/state", "/dashboard/requests/x", "/dashboard/static/../state", "/dashboard/other", "/"]
        for path in closed:
            assert client.get(path).status_code in (401, 404), path
        assert httpx.get(f"{served.url}/dashboard/static/%2e%2e/endpoints.py").status_code in (401, 404)
        assert client.post("/dashboard").status_code == 401
        assert "sesame" not in page.text


def test_a_server_without_the_dashboard_has_none() -> None:
    with echo_server(enable_dashboard=False) as served:
        assert served.client.get("/dashboard").status_code == 404
        assert "/dashboard" not in served.client.get("/", headers={"accept": "text/html"}).text


def test_text_is_for_who_sent_it() -> None:
    local, public = ServeConfig(), ServeConfig(host="0.0.0.0")
    assert may_read(local, "ann", "ann")
    assert may_read(public, "ann", "ann")
    assert not may_read(local, "ann", "ben")
    assert may_read(local, NO_KEY, NO_KEY)
    assert not may_read(public, NO_KEY, NO_KEY)
    assert not may_read(public, "ann", NO_KEY)


@pytest.mark.parametrize("status", [200, 400])
def test_trails_are_found_and_forgotten(status: int) -> None:
    trails = Trails()
    for i in range(2000):
        trail = Trail("POST", "/v1/completions", engine_ids=[f"r{i}"])
        trails.begin(trail)
        assert trails.of(f"r{i}") is trail
        trail.status = status
        trails.end(trail)
    assert trails.of("r0") is None
    assert trails.of("r1999") is not None
    assert len(list(trails)) < 1000
    assert bool(trails.failed) == (status >= 400)


def test_ended_requests_are_kept_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Request:
        def __init__(self, request_id: str, size: int) -> None:
            self.request_id, self.num_prompt_tokens, self.num_output_tokens = request_id, size, 0

    ended: Ended[Request] = Ended()
    ended.keep(Request("a", 1))
    assert ended.find("a") is None
    ended.watch(60.0)
    ended.keep(Request("b", 1))
    assert ended.find("b") is not None
    ended.keep(Request("large", MAX_TOKENS))
    assert [request.request_id for request in ended.latest()] == ["large"]
    monkeypatch.setattr("quire.frontend.ended.time.monotonic", lambda: float("inf"))
    ended.keep(Request("c", 1))
    assert ended.latest() == []


def test_the_front_page_leads_to_the_dashboard() -> None:
    with echo_server() as served:
        assert "/dashboard" in served.client.get("/", headers={"accept": "text/html"}).text
