"""A server process of a test: started, waited for, killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
PATIENCE = 120  # seconds for what must come; a busy machine is no flaw


class ServerProcess:
    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            threading.Thread(target=lambda s=stream, ls=lines: ls.extend(iter(s.readline, "")), daemon=True).start()

    @property
    def url(self) -> str:
        """Known once the server says that it is ready."""
        wait_until(lambda: any(line.startswith("Ready: ") for line in self.out) or self.process.poll() is not None)
        ready = [line for line in self.out if line.startswith("Ready: ")]
        assert ready, "".join(self.out + self.err)
        return ready[0].removeprefix("Ready: ").strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)


@contextlib.contextmanager
def server_process(module: str, *arguments: str, **environment: str) -> Iterator[ServerProcess]:
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    server = ServerProcess([sys.executable, "-m", module, *arguments], ROOT, everything)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def send_raw(url: str, path: str, **body: Any) -> socket.socket:
    """POST without waiting for the answer; closing the socket is a client that goes away."""
    host, _, port = url.removeprefix("http://").partition(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection.sendall(head.encode() + content)
    return connection


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether the condition held once; what holds for a moment only counts, so it is not looked at again.

    A look that costs much is taken more rarely: who is waited for needs the processor.
    """
    deadline = time.monotonic() + seconds
    while True:
        before = time.monotonic()
        if condition():
            return True
        now = time.monotonic()
        if now >= deadline:
            return False
        time.sleep(min(max(0.02, 2 * (now - before)), 0.1))


def status_of(url: str) -> int:
    """HTTP status; 0 if nobody listens."""
    try:
        return httpx.get(url, timeout=30).status_code
    except httpx.HTTPError:
        return 0
