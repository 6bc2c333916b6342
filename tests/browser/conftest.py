"""A headless Chromium, and a server that it looks at."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.process import PATIENCE, server_process

KEY = "sesame"
VIEW, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


@pytest.fixture(scope="module")  # playwright leaves no event loop to the tests that follow
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("there is no chromium (Debian's package has it)")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "1000"]
    options += ["--api-key", f"{KEY} # ann", "other # ben", "--max-num-seqs", "16"]
    options += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    with server_process("quire.cli.main", "serve", *options) as process:
        yield process.url


@pytest.fixture(scope="module")
def cores() -> Iterator[str]:
    """Two, behind two front ends, without a key."""
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "1000"]
    options += ["--max-num-seqs", "16", "--data-parallel-size", "2", "--api-server-count", "2"]
    with server_process("quire.cli.main", "serve", *options) as process:
        yield process.url


class Visit:
    """A page, and what must not have happened on it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        page.on("console", lambda said: said.type in ("error", "warning") and self.problems.append(said.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", self._check_host)

    def _check_host(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.problems.append(f"asked for {request.url}")

    def log_in(self, key: str = KEY, tab: str = "overview") -> None:
        self.page.goto(f"{self.url}/dashboard#{tab}")
        self.page.fill("#key", key)
        self.page.click("#login-form button")
        self.page.wait_for_selector("#tabs", state="visible")
        self.wait("() => document.getElementById('status').textContent === 'Live'")

    def wait(self, function: str, argument: Any = None) -> None:
        """Until it holds. Playwright's own way needs eval in the page, which its policy forbids."""
        deadline = time.monotonic() + PATIENCE
        while not self.page.evaluate(function, argument):
            assert time.monotonic() < deadline, (function, argument, self.problems)
            self.page.wait_for_timeout(50)

    def check_axe(self) -> None:
        """Nothing serious for a screen reader or a keyboard."""
        self.page.evaluate((Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8"))
        found = self.page.evaluate("axe.run()")
        bad = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
        assert bad == [], [(one["id"], [node["html"] for node in one["nodes"]]) for one in bad]

    def shoot(self, name: str, *, whole: bool = False) -> None:
        """For the documents, if QUIRE_SCREENSHOTS names a folder. whole: what is not in sight as well."""
        if folder := os.environ.get("QUIRE_SCREENSHOTS"):
            self.page.evaluate("scrollTo(0, 0)")
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=whole)


@contextmanager
def visit(chromium: Any, url: str, **options: Any) -> Iterator[Visit]:
    context = chromium.new_context(viewport=VIEW, **options) if "viewport" not in options else None
    context = context or chromium.new_context(**options)
    context.set_default_timeout(60_000)
    try:
        visited = Visit(context.new_page(), url)
        yield visited
        assert visited.problems == []
    finally:
        context.close()


@contextmanager
def load(url: str, clients: int, **body: Any) -> Iterator[None]:
    """Clients that ask one after the other."""
    stop = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
            while not stop.is_set():
                story = f"Tell me a story about {number} brave foxes. " + "A fox met a hen on the bridge. " * 4
                asked = {"messages": [{"role": "user", "content": story}], "max_tokens": 150, **body}
                with client.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as reply:
                    for _ in reply.iter_lines():
                        if stop.is_set():
                            break

    threads = [threading.Thread(target=ask, args=(number % 4,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
