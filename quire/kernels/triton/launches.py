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
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.kernels.triton.compilers import TRITON_TESTED

_IS_KNOWN = triton.__version__.startswith(TRITON_TESTED)  # what is compiled for, and what a compiled kernel takes
_OWN_RUN = JITFunction.run  # which a rehearsal replaces
_WIDE = 1 << 31

# With the kernel itself, whose number would else be another's once it is gone.
_compiled: dict[Hashable, tuple[CompiledKernel, tuple[Any, ...], Any]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)`. arguments: all that change, from the first parameter on, without defaults;
    what is neither a tensor, a plain number nor a descriptor is left to Triton. options: constants that the kernel is
    compiled for, and Triton's own."""
    if not _IS_KNOWN or JITFunction.run is not _OWN_RUN or not isinstance(kernel, JITFunction):
        kernel[grid](*arguments, **options)
        return
    active = driver.active
    device = active.get_current_device()
    kinds = _kinds(arguments)
    if kinds is None:
        kernel[grid](*arguments, **options)
        return
    kind = (id(kernel), device, *kinds, *options.items())
    found = _compiled.get(kind)
    if found is None:
        compiled = kernel[grid](*arguments, **options)
        if compiled is not None:
            _compiled[kind] = compiled, _constants(kernel, len(arguments), options), kernel
        return
    compiled, constants, _ = found
    stream = active.get_current_stream(device)
    if _is_watched():
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants, stream=stream)
        return
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *constants)


def _is_watched() -> bool:
    """Whether somebody has asked Triton to be told of launches."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(before is not None and getattr(before, "calls", True)) or bool(
        after is not None and getattr(after, "calls", True)
    )


def _kinds(arguments: tuple[Any, ...]) -> list[Hashable] | None:
    """Equal for arguments for which Triton compiles the same; None: it must look itself."""
    kinds: list[Hashable] = []
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            if argument == 1:
                kinds.append(1)
            elif -_WIDE <= argument < _WIDE:
                kinds.append(2 if argument % 16 else 16)
            else:
                kinds.append((argument % 16 == 0, argument < 1 << 63))
        elif kind is torch.Tensor or isinstance(argument, torch.Tensor):
            kinds += argument.dtype, argument.data_ptr() % 16 == 0
        elif kind is float or argument is None:
            kinds.append(kind)
        elif hasattr(argument, "launched_as"):
            kinds.append(argument.launched_as)
        elif hasattr(argument, "block_shape"):  # a descriptor, whose memory is aligned
            layout = getattr(argument, "layout", None)
            kinds.append((kind, argument.base.dtype, tuple(argument.block_shape), layout, argument.padding))
        else:
            return None
    return kinds


def _constants(kernel: JITFunction[Any], count: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """Values of the parameters behind the first `count`, in their order."""
    given, rest = kernel.params[:count], kernel.params[count:]
    assert not any(one.is_constexpr for one in given), "constants are given by their names"
    assert all(one.is_constexpr for one in rest), "what changes is given by its place"
    return tuple(options.get(one.name, one.default) for one in rest)
