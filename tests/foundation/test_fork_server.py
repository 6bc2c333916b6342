"""Forks that work on strangers' input, on a machine whose processors others want as well."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from quire.foundation.fork_server import ForkClient, Limits

LIMITS = Limits(cpu_seconds=2, wall_seconds=0.6, memory_bytes=1 << 26, forks=2)
SPIN = "while True: pass"


def main(descriptor: str, cpu: str) -> None:
    """The server of these tests: a piece is how to spend time, and how many seconds of it."""
    import socket

    from quire.foundation.fork_server import ForkServer

    def work(body: bytes) -> bytes:
        kind, seconds = body.decode().split()
        if kind == "sleep":
            time.sleep(float(seconds))
        while time.process_time() < float(seconds):
            pass
        return body

    os.sched_setaffinity(0, {int(cpu)})
    ForkServer(socket.socket(fileno=int(descriptor)), work, LIMITS).run()


@pytest.fixture
def crowded() -> Iterator[int]:
    """A processor that others keep busy."""
    cpu = min(os.sched_getaffinity(0))
    busy = [
        subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\n{SPIN}"]) for _ in "ab"
    ]
    yield cpu
    for process in busy:
        process.kill()
        process.wait()


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the system does not tell how long one waits")
def test_to_wait_for_a_processor_is_not_to_take_long(crowded: int) -> None:
    client = ForkClient("tests.foundation.test_fork_server", str(crowded))
    client.send(1, b"spin 0.02")
    assert client.receive() == [(1, b"spin 0.02")]
    client.close()


def test_who_takes_long_is_ended() -> None:
    client = ForkClient("tests.foundation.test_fork_server", str(min(os.sched_getaffinity(0))))
    client.send(1, b"sleep 60")
    client.send(2, b"spin 0.01")
    answers = [*client.receive()]
    while len(answers) < 2:
        answers += client.receive()
    assert sorted(answers) == [(1, b""), (2, b"spin 0.01")]
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
