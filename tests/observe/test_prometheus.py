"""Dashboard and alerts of deploy/, asked of a real Prometheus that scrapes a real server."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import yaml

from tests.server.process import ROOT, server_process, wait_until

DEPLOY = ROOT / "deploy"
PIRATE = ROOT / "examples" / "pirate" / "adapter"
HEADERS = {"authorization": "Bearer sesame"}
RATE = "15s"
REPEATS = {"temperature": 0, "ignore_eos": True, "max_tokens": 120}  # so that drafts are found
NEEDED = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="there is no prometheus (Debian's has it)"
)
NAME = re.compile(r"(?:vllm|quire):\w+|http_\w+|process_\w+")


def panels() -> list[tuple[str, str]]:
    """(title, query) of the dashboard."""
    board = json.loads((DEPLOY / "grafana" / "quire.json").read_text(encoding="utf-8"))
    return [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", ())]


def ask_for_everything(url: str) -> None:
    """Requests of all kinds that the panels count."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    story = "A fox met a hen on the bridge. " * 12
    with httpx.Client(base_url=url, headers=HEADERS, timeout=60) as client:

        def ask(number: int) -> None:
            body: dict[str, Any] = {"messages": [{"role": "user", "content": story}], "max_tokens": 24}
            body |= [{"stream": True}, {"tools": [tool]}, {"model": "pirate"}, REPEATS][number % 4]
            assert client.post("/v1/chat/completions", json=body).status_code == 200

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(12)))
        assert client.post("/v1/chat/completions", json={"messages": 1}).status_code == 400


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of a server and of the Prometheus that watches it."""
    folder = tmp_path_factory.mktemp("prometheus")
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--api-key", "sesame # ann"]
    options += ["--enable-mfu-metrics"]
    options += ["--enable-lora", "--lora-modules", f"pirate={PIRATE}", "--max-lora-rank", "64"]
    options += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "policy": "always"}']
    with server_process("quire.cli.main", "serve", *options) as server, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        [job] = config["scrape_configs"]
        job["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
        job["authorization"] = {"credentials": "sesame"}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
        command = [
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]  # fmt: skip
        process = subprocess.Popen(command)

        def is_ready() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/-/ready").is_success
            except httpx.TransportError:
                return False

        try:
            assert wait_until(is_ready)
            yield server.url, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def query(prometheus: str, text: str) -> list[Any]:
    reply = httpx.get(f"{prometheus}/api/v1/query", params={"query": text}, timeout=30)
    assert reply.status_code == 200, f"{text}: {reply.text}"
    found: list[Any] = reply.json()["data"]["result"]
    return found


@NEEDED
@pytest.mark.long
def test_every_panel_has_data(scraped: tuple[str, str]) -> None:
    server, prometheus = scraped

    assert wait_until(lambda: bool(query(prometheus, "up == 1")))
    empty: dict[str, str] = dict(panels())
    deadline = time.monotonic() + 60
    while empty and time.monotonic() < deadline:
        ask_for_everything(server)
        time.sleep(1)
        empty = {}
        for title, expr in panels():
            text = expr.replace("$__rate_interval", RATE).replace("$model", ".*")
            values = [float(one["value"][1]) for one in query(prometheus, text)]
            if not any(value == value for value in values):  # NaN: nothing over nothing
                empty[title] = expr
    assert empty == {}


@NEEDED
@pytest.mark.long
def test_alerts_ask_for_what_there_is_and_none_fires(scraped: tuple[str, str]) -> None:
    server, prometheus = scraped
    ask_for_everything(server)
    file = DEPLOY / "prometheus" / "alerts.yml"
    checked = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    text = httpx.get(f"{server}/metrics", headers=HEADERS).text
    [group] = yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]:
        for name in NAME.findall(rule["expr"]):
            assert re.search(rf"^{name}[ {{]", text, re.MULTILINE), (rule["alert"], name)
        assert {"summary", "remedy"} <= rule["annotations"].keys()
    told = httpx.get(f"{prometheus}/api/v1/rules", timeout=30).json()["data"]["groups"]
    assert {rule["name"]: rule["health"] for group in told for rule in group["rules"]} == {
        rule["alert"]: "ok" for rule in group["rules"]
    }


def test_the_dashboard_asks_for_names_that_the_documents_know() -> None:
    known = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    for title, expr in panels():
        for name in NAME.findall(expr):
            plain = re.sub(r"_(bucket|sum|count)$", "", name)
            assert plain in known or plain.removesuffix("_total") in known, (title, plain)


def test_panels_have_ids_and_one_source() -> None:
    board = json.loads((DEPLOY / "grafana" / "quire.json").read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert {target["datasource"]["uid"] for panel in board["panels"] for target in panel.get("targets", ())} == {
        "prometheus"
    }
