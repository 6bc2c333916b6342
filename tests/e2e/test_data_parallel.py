"""`quire serve --data-parallel-size 2`: one server over two cores, of which one is killed under many streams."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.process import ServerProcess, status_of, wait_until
from tests.server.several.test_front_ends import metrics
from tests.server.test_restarts import CORE, MODEL, ask_all, processes, requests, serve


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one core answers."""
    with serve(tmp_path_factory.mktemp("batches")) as server:
        return asyncio.run(ask_all(server.url, 28))


def by_engine(server: ServerProcess, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=60).text)
    samples = [sample for family in families for sample in family.samples]
    return {sample.labels["engine"]: sample.value for sample in samples if sample.name == name}


async def kill_one_of(server: ServerProcess, victims: list[psutil.Process], count: int) -> list[dict[str, Any]]:
    """The answers, one core being killed amid them."""
    asked = asyncio.create_task(ask_all(server.url, count))
    await asyncio.sleep(0.3)
    random.choice(victims).kill()
    while len(processes(server, CORE)) == 2:
        await asyncio.sleep(0.01)
    assert await asyncio.to_thread(status_of, f"{server.url}/readyz") == 200  # the other one serves
    return await asked


@pytest.mark.parametrize("front_ends", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_every_stream_outlives_its_core(tmp_path: Path, alone: list[dict[str, Any]], front_ends: str) -> None:
    options = ["--data-parallel-size", "2", "--api-server-count", front_ends]
    with serve(tmp_path, *options) as server:
        assert server.url
        found = asyncio.run(kill_one_of(server, processes(server, CORE), len(alone)))
        for (path, body), is_now, was in zip(requests(len(alone)), found, alone, strict=True):
            assert is_now == was, (path, body)
        assert wait_until(lambda: sum(by_engine(server, "vllm:engine_healthy").values()) == 2)
        assert wait_until(lambda: metrics(server)["vllm:num_requests_running"] == 0)
        assert sorted(by_engine(server, "quire:engine_restarts_total").values()) == [0, 1]
        assert by_engine(server, "vllm:e2e_request_latency_seconds_count").keys() == {"all"}
        assert asyncio.run(ask_all(server.url, 9)) == alone[:9]  # the new one, too
        assert wait_until(lambda: min(by_engine(server, "vllm:generation_tokens_total").values()) > 20)
        said = "".join(server.err)
        assert "Traceback" not in said, said
        assert status_of(f"{server.url}/health") == 200


def test_utilities_reach_every_core(tmp_path: Path) -> None:
    with serve(tmp_path, "--data-parallel-size", "2", "--server-dev-mode") as server:
        body = {"model": MODEL, "prompt": "one two three four " * 40, "max_tokens": 1, "temperature": 0}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for _ in range(3):
                assert client.post("/v1/completions", json=body).status_code == 200
            assert metrics(server)["vllm:prefix_cache_hits_total"] > 0  # near its prefix
            assert sum(by_engine(server, "vllm:generation_tokens_total").values()) >= 3
            assert client.post("/reset_prefix_cache").json() == {"success": True}
            hits = metrics(server)["vllm:prefix_cache_hits_total"]
            assert client.post("/v1/completions", json=body).status_code == 200
            assert metrics(server)["vllm:prefix_cache_hits_total"] == hits
            assert by_engine(server, "vllm:engine_healthy") == {"0": 1.0, "1": 1.0}
