"""Without a GPU, a driver or Triton it is quietly nothing; a second time as well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from quire.foundation import wake_gpu


@pytest.mark.parametrize(
    "fingerprint", [wake_gpu._FINGERPRINT, "no_such_package:key", "quire.foundation.errors:nothing"]
)
def test_waking_never_fails(monkeypatch: pytest.MonkeyPatch, fingerprint: str) -> None:
    monkeypatch.setattr(wake_gpu, "_FINGERPRINT", fingerprint)
    monkeypatch.setattr(wake_gpu, "_COMPILERS", "builtins:dict")
    monkeypatch.setattr(wake_gpu, "_driver", lambda: SimpleNamespace(cuInit=lambda _flags: 100))  # finds no device
    errors: list[object] = []
    monkeypatch.setattr("threading.excepthook", errors.append)
    for _ in range(2):
        for thread in wake_gpu.wake_gpu():
            thread.join(60)
            assert not thread.is_alive()
    assert errors == []


def test_who_needs_it_awake_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, wakes = threading.Event(), threading.Event()

    def load(name: str) -> Callable[[], None]:
        begun.set()
        assert wakes.wait(60)
        return lambda: done.append(name)

    done: list[str] = []
    monkeypatch.setattr(wake_gpu, "_driver", lambda: SimpleNamespace(cuInit=lambda _flags: 100))
    monkeypatch.setattr(wake_gpu, "load", load)
    wake_gpu.wake_gpu()
    assert begun.wait(60)
    threading.Timer(0.05, wakes.set).start()
    wake_gpu.wait_until_awake()
    assert done == [wake_gpu._COMPILERS, wake_gpu._FINGERPRINT, wake_gpu._LIBRARY]


def test_the_library_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second engine of a process, whose kernels' cache may be another folder, would build one of other types."""

    class Library:
        """As Triton's: one, set up each time that it is asked for."""

        instance: Library

        def __new__(cls) -> Library:
            if not hasattr(cls, "instance"):
                cls.instance = super().__new__(cls)
            return cls.instance

        def __init__(self) -> None:
            built.append(self)

    built: list[Library] = []
    monkeypatch.setattr(wake_gpu, "_driver", lambda: SimpleNamespace(cuInit=lambda _flags: 100))
    monkeypatch.setattr(wake_gpu, "load", lambda name: Library if name == wake_gpu._LIBRARY else dict)
    for _ in range(3):
        wake_gpu.wake_gpu()
        wake_gpu.wait_until_awake()
    assert len(built) == 1


def test_a_machine_without_the_driver_loads_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(wake_gpu, "_driver", lambda: None)
    monkeypatch.setattr(wake_gpu, "load", loaded.append)
    for thread in wake_gpu.wake_gpu():
        thread.join(60)
    assert loaded == []
