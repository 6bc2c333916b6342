"""Servers on machines of their own, a router on a third, a switch between them: what a machine does that vanishes
without a word. Its cable is pulled at the switch, so that nobody's interface goes down: packets are lost, and nothing
closes a connection. Needs to be root, as network namespaces do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_two_machines import Machines, line, run
from tests.server.process import wait_until

pytestmark = pytest.mark.long
ROUTER, SERVERS = "10.231.8.1", ("10.231.8.2", "10.231.8.3")
# Prints for each answer what it is, and what took it how long.
ASK = """
import http.client, json, sys, threading, time, urllib.parse
router, count, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def ask(number):
    began, status = time.monotonic(), 0
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(router).netloc, timeout=120)
    body = json.dumps({"model": "quire-demo", "prompt": str(number), "max_tokens": tokens})
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = json.loads(answer.read())
        status = answer.status
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(error, file=sys.stderr)
    found.append((status, round(time.monotonic() - began, 1)))
found = []
threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(found), flush=True)
"""


class Network(Machines):
    """Machines that a switch connects; the first is the router's."""

    def __init__(self) -> None:
        super().__init__()
        self.switch = f"qs{os.getpid()}"
        self.names = {address: f"q{number}{os.getpid()}" for number, address in enumerate((ROUTER, *SERVERS))}

    def set_up(self) -> None:
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "switch", "up")
        for address, name in self.names.items():
            run("ip", "netns", "add", name)
            run("ip", "link", "add", "cable", "netns", name, "type", "veth", "peer", name, "netns", self.switch)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            run("ip", "-n", name, "link", "set", "cable", "up")
            run("ip", "-n", self.switch, "link", "set", name, "master", "switch")
            run("ip", "-n", self.switch, "link", "set", name, "up")

    def pull(self, address: str) -> None:
        """Its cable out of the switch: no interface goes down, and packets go nowhere."""
        run("ip", "-n", self.switch, "link", "set", self.names[address], "nomaster")

    def plug(self, address: str) -> None:
        run("ip", "-n", self.switch, "link", "set", self.names[address], "master", "switch")

    @property
    def spaces(self) -> list[str]:
        return [*self.names.values(), self.switch]


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.set_up()
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


class Fleet:
    """A router, and servers that answer a token in so many seconds."""

    def __init__(self, network: Network, folder: Path, delay: float, *options: str) -> None:
        self.network = network
        self.servers: dict[str, Any] = {}
        for address in SERVERS:
            serve = ["-m", "tests.server.echo_process", "--host", address, "--port", "8000"]
            serve += ["--batch-dir", str(folder / address)]
            self.servers[address] = network.start(network.names[address], *serve, ECHO_DELAY=str(delay))
        urls = [line(server, "Ready: ").removeprefix("Ready: ") for server in self.servers.values()]
        route = ["--port", "0", "--health-interval", "0.2", "--policy", "round_robin", *options, "--backend", *urls]
        started = network.start(network.names[ROUTER], "-m", "quire.cli.main", "route", *route)
        self.url = line(started, "Ready: ").removeprefix("Ready: ")
        assert wait_until(lambda: all(self.look("ready").values()), 30)

    def look(self, what: str) -> dict[str, Any]:
        """Of each server, by its address."""
        show = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
        asked = self.network.start(self.network.names[ROUTER], "-c", show, f"{self.url}/router/backends")
        found = json.loads(line(asked))["backends"]
        return {one["url"].removeprefix("http://").partition(":")[0]: one[what] for one in found}

    def ask(self, count: int, tokens: int) -> subprocess.Popen[str]:
        return self.network.start(self.network.names[ROUTER], "-c", ASK, self.url, str(count), str(tokens))

    @staticmethod
    def answers(asked: subprocess.Popen[str]) -> list[tuple[int, float]]:
        """Status and seconds of each."""
        found = [tuple(one) for one in json.loads(line(asked))]
        print(found)
        return found


def test_requests_under_way_on_a_machine_that_vanishes_are_answered_by_another(
    network: Network, tmp_path: Path
) -> None:
    fleet = Fleet(network, tmp_path, 0.5)
    asked = fleet.ask(8, 12)  # six seconds, and not a byte before
    assert wait_until(lambda: sum(fleet.look("in_flight").values()) == 8, 30)
    assert set(fleet.look("in_flight").values()) == {4}
    network.pull(SERVERS[0])
    assert [status for status, _ in fleet.answers(asked)] == [200] * 8
    assert fleet.look("ready")[SERVERS[0]] is False
    network.plug(SERVERS[0])
    assert wait_until(lambda: all(fleet.look("ready").values()), 60)
    before = fleet.look("requests")[SERVERS[0]]
    assert [status for status, _ in fleet.answers(fleet.ask(4, 1))] == [200] * 4
    assert fleet.look("requests")[SERVERS[0]] > before


def test_requests_that_come_before_anybody_knows_are_answered_by_another(network: Network, tmp_path: Path) -> None:
    fleet = Fleet(network, tmp_path, 0.0, "--health-interval", "30")  # no probe will tell
    assert [status for status, _ in fleet.answers(fleet.ask(8, 1))] == [200] * 8  # connections are kept
    network.pull(SERVERS[1])
    assert [status for status, _ in fleet.answers(fleet.ask(8, 1))] == [200] * 8
    assert [status for status, _ in fleet.answers(fleet.ask(8, 1))] == [200] * 8


def test_a_killed_server_s_requests_are_answered_by_another(network: Network, tmp_path: Path) -> None:
    fleet = Fleet(network, tmp_path, 0.5)
    asked = fleet.ask(8, 12)
    assert wait_until(lambda: sum(fleet.look("in_flight").values()) == 8, 30)
    fleet.servers[SERVERS[0]].send_signal(signal.SIGKILL)
    assert [status for status, _ in fleet.answers(asked)] == [200] * 8
