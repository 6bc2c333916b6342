"""A process that compiles kernels into Triton's cache: it has the compiler loaded, and forks for each kernel.

So kernels are compiled side by side, which threads of one interpreter are not: more than half of the work is Python. No
GPU is touched. torch is not imported, whose import takes longer than all the compiling: modules of kernels name it in
their wrappers, and are given a stand-in. Were a kernel another one for it, its name in the cache would be another one
too, under which nobody looks.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from quire.foundation.bytecode import keep_bytecode
from quire.foundation.fork_server import ForkServer, Limits

_GiB = 1024**3


class Absent(ModuleType):
    """Whatever is asked of torch."""

    __path__: Sequence[str] = ()

    def __init__(self, name: str = "", *_: object) -> None:
        super().__init__(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *_: object, **__: object) -> Absent:
        return self


class WithoutTorch(MetaPathFinder, Loader):
    """Finds an `Absent` for torch and its modules."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "torch" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class TargetDriver:
    """Tells Triton which GPU it compiles for, as the driver of that GPU would."""

    def __init__(self, backend: str, arch: int, warp_size: int) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaLauncher

        self._target = GPUTarget(backend, arch, warp_size)
        self.launcher_cls = CudaLauncher

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compile_kernel(body: bytes) -> bytes:
    """body: see `Compilers`. Raises what Triton does."""
    from triton.runtime import driver

    from quire.kernels.triton.kernel_names import settle_name

    module, name, specialization, with_launcher = json.loads(body)[1:]
    function = getattr(import_module(module), name)
    settle_name(function)
    kernel = function.preload(specialization)
    if with_launcher:
        with suppress(Exception):  # who loads it builds it then, and says why it cannot
            driver.active.launcher_cls(kernel.src, kernel.metadata)
    return b"compiled"


class CompileServer(ForkServer):
    def _fork(self, number: int, body: bytes) -> None:
        from triton.compiler.compiler import make_backend
        from triton.runtime import driver

        target, module = json.loads(body)[:2]
        if driver._active is None:
            driver.set_active(TargetDriver(*target))  # type: ignore[arg-type]
        with suppress(Exception):  # once, for all forks that come; what fails, a fork meets again
            make_backend(driver.active.get_current_target()).hash()
            import_module(module)
        super()._fork(number, body)


def main(arguments: list[str]) -> None:
    sock, forks = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    keep_bytecode("triton")
    sys.meta_path.insert(0, WithoutTorch())
    from triton.experimental import gluon  # noqa: F401 (as most kernels do)
    from triton.runtime.cache import triton_key

    triton_key()
    limits = Limits(
        cpu_seconds=300, wall_seconds=300.0, memory_bytes=16 * _GiB, forks=forks, file_bytes=_GiB, niceness=0
    )
    CompileServer(sock, compile_kernel, limits).run()


if __name__ == "__main__":
    main(sys.argv[1:])
