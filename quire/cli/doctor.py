"""quire doctor: what this machine can run, and why not. Works without torch."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterator, Sequence

from quire.cli import machine
from quire.config.devices import other_accelerator

MIN_PYTHON, MIN_TORCH = (3, 11), (2, 11)
LOW_MEMORY, LOW_DISK = 4 * machine.GIB, 10 * machine.GIB
PORT = 8000
SERVER_PACKAGES = ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client")

Finding = tuple[str, str, str]  # mark, subject, what was found and what to do


def run(arguments: Sequence[str]) -> int:
    """Exit code 0 if a model can run here, on a GPU or a CPU, else 1."""
    if arguments:
        print("usage: quire doctor\n\nSays what this machine can run, and why not.")
        return 0 if arguments[0] in ("-h", "--help") else 2
    findings = [finding for check in CHECKS for finding in check()]
    width = max(len(subject) for _, subject, _ in findings)
    for mark, subject, text in findings:
        print(f"{mark:>4}  {subject:<{width}}  {text}")
    bad = [subject for mark, subject, _ in findings if mark == "BAD"]
    print()
    print(f"Cannot run models here yet: {', '.join(bad)}" if bad else f"Ready for models on {_where(findings)}.")
    return 1 if bad else 0


def _where(findings: list[Finding]) -> str:
    there = {subject for mark, subject, _ in findings if mark == "ok"}
    return "GPU and CPU" if there & {"CUDA", "Accelerator"} else "CPU"


def check_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= MIN_PYTHON
    yield "ok" if good else "BAD", "Python", version if good else f"{version}; 3.11 or newer is needed"


def check_packages() -> Iterator[Finding]:
    torch = machine.version("torch")
    if torch is None:
        yield "BAD", "torch", "not installed: pip install torch"
    else:
        numbers = tuple(int(part) for part in torch.split("+")[0].split(".")[:2])
        good = numbers >= MIN_TORCH
        yield "ok" if good else "BAD", "torch", torch if good else f"{torch}; 2.11 or newer is needed"
    for name in ("tokenizers", "msgspec", "zmq"):
        found = machine.version("pyzmq" if name == "zmq" else name)
        yield ("ok" if found else "BAD"), name, found or "not installed: pip install quire"
    missing = [name for name in SERVER_PACKAGES if not machine.version(name)]
    text = f"missing for `quire serve`: {', '.join(missing)}: pip install quire" if missing else "installed"
    yield "warn" if missing else "ok", "HTTP server", text


def check_gpu() -> Iterator[Finding]:
    gpus, problem = machine.gpus()
    if not gpus:
        yield "-", "GPU", problem or "none"
        return
    for gpu in gpus:
        yield (
            "ok",
            f"GPU {gpu.index}",
            f"{gpu.name}, {gpu.free / machine.GIB:.1f} of {gpu.total / machine.GIB:.1f} GiB free, driver {gpu.driver}",
        )
    build = machine.torch_cuda_build()
    if machine.version("torch") is None:
        return
    if build is None:
        yield "warn", "CUDA", "torch was built without CUDA: install the CUDA build of torch to use the GPU"
    else:
        yield "ok", "CUDA", f"torch was built for CUDA {build}"
        triton = machine.version("triton")
        yield ("ok" if triton else "warn"), "triton", triton or "not installed; GPU kernels need it: pip install triton"


def check_other_accelerator() -> Iterator[Finding]:
    if (found := other_accelerator()) is not None:
        yield "ok", "Accelerator", f"--device torch:{found}: in plain torch, without kernels of Quire's own"


def check_compiler() -> Iterator[Finding]:
    found = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    if machine.gpus()[0]:
        yield (
            "ok" if found else "warn",
            "C compiler",
            found or "none: triton needs one for its launchers (apt install gcc)",
        )


def check_room() -> Iterator[Finding]:
    total, free = machine.memory()
    yield (
        "ok" if free >= LOW_MEMORY else "warn",
        "Memory",
        f"{free / machine.GIB:.1f} of {total / machine.GIB:.1f} GiB free, {machine.cpu_count()} CPU cores usable",
    )
    cache = machine.hub_cache()
    disk = shutil.disk_usage(machine.existing(cache)).free
    yield "ok" if disk >= LOW_DISK else "warn", "Disk", f"{disk / machine.GIB:.1f} GiB free for downloads in {cache}"


def check_port() -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            yield "warn", f"Port {PORT}", "in use: give `quire serve` another --port"
        else:
            yield "ok", f"Port {PORT}", "free"


CHECKS = (check_python, check_packages, check_gpu, check_other_accelerator, check_compiler, check_room, check_port)
