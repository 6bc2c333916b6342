"""Two machines, as two network namespaces: ranks of one engine on both, and a router over a server on each, with a
machine that goes and comes back. Needs to be root, as network namespaces do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import wait_until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
HERE, THERE = "10.231.7.1", "10.231.7.2"
ENGINE = """
import json, sys, time
from quire import LLM, SamplingParams
options = json.loads(sys.argv[1])
params = SamplingParams(max_tokens=int(sys.argv[2]), temperature=0, ignore_eos=True)
with LLM(device="cpu", dtype="float32", num_threads=1, max_num_seqs=4, **options) as llm:
    print("started", flush=True)
    outputs = llm.generate(["One", "Two and"], params, use_tqdm=False)
    restarts = sum(metric.value for metric in llm.get_metrics() if metric.name == "quire:engine_restarts")
    print(json.dumps([[output.outputs[0].token_ids for output in outputs], restarts]), flush=True)
"""


class Machines:
    """`here` and `there`, with a cable between them."""

    def __init__(self) -> None:
        self.here, self.there = f"qh{os.getpid()}", f"qt{os.getpid()}"
        self._processes: list[subprocess.Popen[str]] = []

    def set_up(self) -> None:
        run("ip", "netns", "add", self.here)
        run("ip", "netns", "add", self.there)
        run("ip", "link", "add", "cable", "netns", self.here, "type", "veth", "peer", "cable", "netns", self.there)
        for name, address in ((self.here, HERE), (self.there, THERE)):
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            run("ip", "-n", name, "link", "set", "cable", "up")

    def cable(self, state: str) -> None:
        run("ip", "-n", self.there, "link", "set", "cable", state)

    def start(self, where: str, *command: str, **environment: str) -> subprocess.Popen[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        command = ("ip", "netns", "exec", where, sys.executable, *command)
        started = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        self._processes.append(started)
        return started

    @property
    def spaces(self) -> list[str]:
        return [self.here, self.there]

    def close(self) -> None:
        for name in self.spaces:
            asked = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in asked.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", name], check=False)
        for process in self._processes:
            process.wait()


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines()
    try:
        made.set_up()
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


def line(process: subprocess.Popen[str], beginning: str = "") -> str:
    assert process.stdout is not None
    for found in process.stdout:
        if found.startswith(beginning):
            return found.strip()
    raise AssertionError(f"it ended with {process.wait()}")


def test_an_engine_over_both_outlives_the_cable(machines: Machines) -> None:
    alone = machines.start(machines.here, "-c", ENGINE, "{}", "400")
    assert line(alone) == "started"
    wanted, _ = json.loads(line(alone))
    cluster = {"QUIRE_MASTER": f"{HERE}:29500", "QUIRE_CLUSTER_KEY": "secret"}
    for rank, where in enumerate((machines.here, machines.there)):
        machines.start(where, "-m", "quire.cli.main", "worker", "--rank", str(rank), **cluster)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "external"}
    engine = machines.start(machines.here, "-c", ENGINE, json.dumps(options), "400", **cluster)
    assert line(engine) == "started"
    time.sleep(0.5)
    machines.cable("down")
    time.sleep(6)
    machines.cable("up")
    found, restarts = json.loads(line(engine))
    assert found == wanted
    assert restarts >= 1


def test_a_router_over_a_server_on_each(machines: Machines, tmp_path: Path) -> None:
    ask = """
import json, sys, urllib.request
body = json.dumps({"model": "quire-demo", "prompt": sys.argv[2], "max_tokens": 4}).encode()
asked = urllib.request.Request(sys.argv[1] + "/v1/completions", body, {"Content-Type": "application/json"})
try:
    print(urllib.request.urlopen(asked, timeout=60).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""
    urls = []
    servers: list[Any] = []
    for number, (where, address) in enumerate(((machines.here, HERE), (machines.there, THERE))):
        serve = ["-m", "tests.server.echo_process", "--host", address, "--port", "8000"]
        servers.append(machines.start(where, *serve, "--batch-dir", str(tmp_path / str(number))))
        urls.append(line(servers[-1], "Ready: ").removeprefix("Ready: "))
    options = ["--port", "0", "--health-interval", "0.2", "--policy", "round_robin", "--backend", *urls]
    router = line(machines.start(machines.here, "-m", "quire.cli.main", "route", *options), "Ready: ")
    router = router.removeprefix("Ready: ")

    def answers() -> list[str]:
        return [line(machines.start(machines.here, "-c", ask, router, str(number))) for number in range(4)]

    assert answers() == ["200"] * 4
    machines.cable("down")
    assert answers() == ["200"] * 4
    machines.cable("up")
    servers[0].kill()  # the other machine has it alone
    assert wait_until(lambda: answers() == ["200"] * 4, 60)
