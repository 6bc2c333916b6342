"""The name of a kernel in Triton's cache, the same in every process.

It is a hash, also of the constants that the kernel and the functions it calls find in their modules. Triton 3.6 takes
in those of a called function only if that one was hashed before; and so who happened to come first decided whether a
start found what the one before it had compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable


def settle_name(function: Any) -> None:
    """Hash all that `function` calls before itself."""
    if function.hash is None:
        for callee in _called(function):
            if callee is not function:
                settle_name(callee)
        _ = function.cache_key


def _called(function: Any) -> Iterator[Any]:
    code, known = function.fn.__code__, function.fn.__globals__
    found = [known.get(name) for name in code.co_names]
    for module in [one for one in found if isinstance(one, ModuleType)]:
        found += [vars(module).get(name) for name in code.co_names]
    return (one for one in found if isinstance(one, JITCallable))
