"""Without a GPU, a driver or Triton it is quietly nothing; a second time as well."""

from __future__ import annotations

import pytest

from quire.foundation import wake_gpu


@pytest.mark.parametrize(
    "fingerprint", [wake_gpu._FINGERPRINT, "no_such_package:key", "quire.foundation.errors:nothing"]
)
def test_waking_never_fails(monkeypatch: pytest.MonkeyPatch, fingerprint: str) -> None:
    monkeypatch.setattr(wake_gpu, "_FINGERPRINT", fingerprint)
    errors: list[object] = []
    monkeypatch.setattr("threading.excepthook", errors.append)
    for _ in range(2):
        for thread in wake_gpu.wake_gpu():
            thread.join(60)
            assert not thread.is_alive()
    assert errors == []
