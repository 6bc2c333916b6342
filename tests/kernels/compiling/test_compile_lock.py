"""Processes that share a folder of kernels compile one after another."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from quire.kernels.triton.compile_lock import CompileLock

HOLD = """
import sys
from pathlib import Path
from quire.kernels.triton.compile_lock import CompileLock
with CompileLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_who_comes_second_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "kernels")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        lock, inside = CompileLock(tmp_path / "kernels"), threading.Event()

        def compile_something() -> None:
            with lock:
                inside.set()

        threads = [threading.Thread(target=compile_something, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert not inside.wait(0.2), "two processes compile at once"
    finally:
        first.kill()
        first.wait()
    for thread in threads:
        thread.join(30)
    assert inside.is_set()


def test_threads_of_one_process_hold_it_together(tmp_path: Path) -> None:
    lock = CompileLock(tmp_path)
    with lock, lock:
        pass
    with lock:
        pass


def test_a_folder_that_cannot_be_made_has_no_lock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with CompileLock(tmp_path / "file" / "kernels"):
        pass
