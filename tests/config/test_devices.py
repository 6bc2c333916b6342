"""Which device "auto" is, by what the system and torch's build say; nothing of torch is imported for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.config import devices
from quire.config.attention import check_attention_backend
from quire.config.devices import platform_of, resolve_device, runs_on_cpu
from quire.foundation.errors import ConfigError

SYSTEMS: dict[str, tuple[dict[str, object], str]] = {
    "an NVIDIA GPU": ({"gpu": True, "torch": "2.11.0+cu130"}, "cuda"),
    "an NVIDIA GPU, and torch for another": ({"gpu": True, "torch": "2.11.0+rocm7.0", "paths": ["/dev/kfd"]}, "cuda"),
    "an AMD GPU": ({"torch": "2.11.0+rocm7.0", "paths": ["/dev/kfd"]}, "torch:cuda"),
    "an AMD GPU, and torch for CPUs": ({"torch": "2.11.0+cpu", "paths": ["/dev/kfd"]}, "cpu"),
    "torch for AMD, and no GPU": ({"torch": "2.11.0+rocm7.0"}, "cpu"),
    "an Intel GPU": ({"torch": "2.11.0+xpu", "paths": ["/dev/dri/renderD128"]}, "torch:xpu"),
    "a Mac": ({"system": "Darwin", "machine": "arm64", "torch": "2.11.0"}, "torch:mps"),
    "an old Mac": ({"system": "Darwin", "machine": "x86_64", "torch": "2.11.0"}, "cpu"),
    "nothing": ({"torch": "2.11.0"}, "cpu"),
}


def pretend(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    told, best = SYSTEMS[name]
    paths = [str(path) for path in told.get("paths", ())]  # type: ignore[attr-defined]
    monkeypatch.setattr(devices, "has_gpu", lambda: bool(told.get("gpu")))
    monkeypatch.setattr(devices.platform, "system", lambda: told.get("system", "Linux"))
    monkeypatch.setattr(devices.platform, "machine", lambda: told.get("machine", "x86_64"))
    monkeypatch.setattr(devices, "version", lambda _: told["torch"])
    monkeypatch.setattr(devices.os.path, "exists", paths.__contains__)
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: [p for p in paths if p.startswith(pattern.rstrip("*"))])
    return best


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_best_there_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    best, notes = pretend(monkeypatch, name), []
    assert resolve_device("auto", notes) == best
    assert notes[0].startswith(f"device={best}: ")
    plain = best if best.startswith("torch:") else f"torch:{best}"
    assert resolve_device("torch", notes) == plain, "the same choice, in plain torch"
    assert runs_on_cpu(plain) == (best == "cpu")


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "nothing")
    for name in ("cpu", "torch:cpu", "torch:mps", "torch:cuda"):
        assert resolve_device(name, []) == name
        assert platform_of(name) in ("cpu", "torch")
    for name, said in [
        ("cuda", "no NVIDIA GPU and driver"), ("cuda:1", "cuda has no kinds"), ("cpu:0", "cpu has no kinds"),
        ("torch:cuda:1", "expected torch:TYPE"), ("torch:GPU", "expected torch:TYPE"),
        ("touch", "did you mean 'torch'"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            resolve_device(name, [])


def test_attention_backends_are_known_at_the_door() -> None:
    for name in ("auto", "triton", "torch_cpu", "sdpa", "flashinfer", "flash_attn"):
        check_attention_backend(name)
    with pytest.raises(
        ConfigError, match="'magic' is unknown; there are: auto, triton, triton_mla, torch_cpu, sdpa, flashinfer"
    ):
        check_attention_backend("magic")


def test_torch_is_not_asked() -> None:
    code = (
        "import sys; from quire.config import devices as d; d.resolve_device('auto', []); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
