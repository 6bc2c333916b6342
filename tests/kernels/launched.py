"""A pytest plugin: the names of the kernels that Triton's interpreter ran, a line each, in the file that
QUIRE_LAUNCHED_KERNELS names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from triton.runtime import interpreter

_names: set[str] = set()
_run = interpreter.InterpretedFunction.run


def _counted(self: Any, *args: Any, **kwargs: Any) -> Any:
    _names.add(self.fn.__name__)
    return _run(self, *args, **kwargs)


def pytest_configure() -> None:
    interpreter.InterpretedFunction.run = _counted


def pytest_sessionfinish() -> None:
    Path(os.environ["QUIRE_LAUNCHED_KERNELS"]).write_text("\n".join(sorted(_names)), encoding="utf-8")
