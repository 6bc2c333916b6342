"""quire collect-env: versions, plugins and hardware, for a bug report."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import quire
from quire.cli import machine
from quire.foundation.registry import installed_plugins

PACKAGES = (
    *("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "huggingface-hub", "msgspec"),
    *("pyzmq", "jinja2", "tyro", "fastapi", "uvicorn", "pydantic", "orjson", "uvloop", "httptools"),
    *("prometheus_client", "openai"),
)
VARIABLES = ("QUIRE_", "CUDA", "NCCL", "TORCH", "TRITON", "OMP_", "HF_", "LD_LIBRARY_PATH", "PYTHON")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def run(arguments: Sequence[str]) -> int:
    if arguments:
        print("usage: quire collect-env\n\nPrints versions, plugins and hardware, for a bug report.")
        return 0 if arguments[0] in ("-h", "--help") else 2
    for name, value in facts():
        print(f"{name:<22} {value}")
    return 0


def facts() -> list[tuple[str, str]]:
    total, free = machine.memory()
    gpus, problem = machine.gpus()
    lines = [
        ("quire", quire.__version__),
        ("python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})"),
        ("platform", platform.platform()),
        ("libc", " ".join(platform.libc_ver())),
        ("cpu", f"{_cpu_name()}, {machine.cpu_count()} usable of {os.cpu_count()}"),
        ("memory", f"{free / machine.GIB:.1f} of {total / machine.GIB:.1f} GiB free"),
        *((f"gpu {g.index}", f"{g.name}, {g.total / machine.GIB:.1f} GiB, driver {g.driver}") for g in gpus),
        *([] if gpus else [("gpu", problem or "none")]),
        ("torch's CUDA", machine.torch_cuda_build() or "none"),
        *((tool, _first_line(tool)) for tool in ("gcc", "clang", "nvcc", "cmake")),
        *((name, machine.version(name) or "not installed") for name in PACKAGES),
        *(("plugin", str(plugin)) for plugins in installed_plugins().values() for plugin in plugins),
    ]
    names = sorted(name for name in os.environ if name.startswith(VARIABLES))
    return lines + [(name, "(hidden)" if any(word in name for word in SECRET) else os.environ[name]) for name in names]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _first_line(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        return "not found"
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except OSError as error:
        return f"{path}: {error}"
    lines = [line for line in output.splitlines() if line.strip()]
    return (lines[-1] if tool == "nvcc" else lines[0]) if lines else path
