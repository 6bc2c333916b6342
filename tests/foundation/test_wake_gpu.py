"""Without a GPU, a driver or Triton it is quietly nothing; a second time as well."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.foundation import wake_gpu


@pytest.mark.parametrize(
    "fingerprint", [wake_gpu._FINGERPRINT, "no_such_package:key", "quire.foundation.errors:nothing"]
)
def test_waking_never_fails(monkeypatch: pytest.MonkeyPatch, fingerprint: str) -> None:
    monkeypatch.setattr(wake_gpu, "_FINGERPRINT", fingerprint)
    monkeypatch.setattr(wake_gpu, "_driver", lambda: SimpleNamespace(cuInit=lambda _flags: 100))  # finds no device
    errors: list[object] = []
    monkeypatch.setattr("threading.excepthook", errors.append)
    for _ in range(2):
        for thread in wake_gpu.wake_gpu():
            thread.join(60)
            assert not thread.is_alive()
    assert errors == []


def test_a_machine_without_the_driver_loads_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(wake_gpu, "_driver", lambda: None)
    monkeypatch.setattr(wake_gpu, "load", loaded.append)
    for thread in wake_gpu.wake_gpu():
        thread.join(60)
    assert loaded == []
