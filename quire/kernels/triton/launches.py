"""Launches without Triton's look at every argument.

A launch asks of each argument what a kernel would be compiled for, which is more than half of its Python. Here the
answer is found by less: by types, by whether addresses and numbers divide by 16 and whether numbers are 1, which is all
that Triton compiles for. The first launch of each kind is Triton's own.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.kernels.triton.compilers import TRITON_TESTED

_IS_KNOWN = triton.__version__.startswith(TRITON_TESTED)  # what is compiled for, and what a compiled kernel takes
_OWN_RUN = JITFunction.run  # which a rehearsal replaces
_WIDE = 1 << 31
_OTHER = object()

# With the kernel itself, whose number would else be another's once it is gone.
_compiled: dict[Hashable, tuple[CompiledKernel, tuple[Any, ...], Any]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)`. arguments: all that change, from the first parameter on, without defaults;
    what is neither a tensor, a plain number nor a descriptor is left to Triton. options: constants that the kernel is
    compiled for, and Triton's own."""
    if not _IS_KNOWN or JITFunction.run is not _OWN_RUN or not isinstance(kernel, JITFunction):
        kernel[grid](*arguments, **options)
        return
    device = driver.active.get_current_device()
    kind = (id(kernel), device, *map(_kind, arguments), *options.items())
    if _OTHER in kind:
        kernel[grid](*arguments, **options)
        return
    found = _compiled.get(kind)
    if found is None:
        compiled = kernel[grid](*arguments, **options)
        if compiled is not None:
            _compiled[kind] = compiled, _constants(kernel, len(arguments), options), kernel
        return
    compiled, constants, _ = found
    stream = driver.active.get_current_stream(device)
    compiled[(*grid, 1, 1)[:3]](*arguments, *constants, stream=stream)


def _kind(argument: Any) -> Hashable:
    """Equal for arguments for which Triton compiles the same; _OTHER: it must look itself."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    kind = type(argument)
    if kind is int:
        return 1 if argument == 1 else (argument % 16 == 0, -_WIDE <= argument < _WIDE, argument < 1 << 63)
    if kind is float or argument is None:
        return kind
    if hasattr(argument, "block_shape"):  # a descriptor, whose memory is aligned
        layout = getattr(argument, "layout", None)
        return kind, argument.base.dtype, tuple(argument.block_shape), layout, argument.padding
    return _OTHER


def _constants(kernel: JITFunction[Any], count: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """Values of the parameters behind the first `count`, in their order."""
    given, rest = kernel.params[:count], kernel.params[count:]
    assert not any(one.is_constexpr for one in given), "constants are given by their names"
    assert all(one.is_constexpr for one in rest), "what changes is given by its place"
    return tuple(options.get(one.name, one.default) for one in rest)
