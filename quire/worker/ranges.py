"""Names in a profile: each step and each layer that runs eagerly is a range, in torch's trace and in NVTX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Ranges:
    """On `model` from `open` to `close`. What is replayed from a graph has no layers, as nobody calls them."""

    def __init__(self, model: nn.Module, *, nvtx: bool) -> None:
        self._model, self._nvtx = model, nvtx
        self._hooks: list[Any] = []
        self._stack: list[Any] = []  # ranges of layers that have begun

    def open(self) -> None:
        for name, module in self._model.named_modules():
            if name:
                self._hooks.append(module.register_forward_pre_hook(self._beginning(name)))
                self._hooks.append(module.register_forward_hook(self._end, always_call=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        while self._stack:
            self._end()

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        self._begin(name)
        try:
            yield
        finally:
            self._end()

    def _beginning(self, name: str) -> Any:
        def begin(_module: nn.Module, _given: Any) -> None:
            self._begin(name)

        return begin

    def _begin(self, name: str) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)
            self._stack.append(None)
        else:
            recorded = torch.profiler.record_function(name)
            recorded.__enter__()
            self._stack.append(recorded)

    def _end(self, *_: Any) -> None:
        recorded = self._stack.pop()
        if recorded is None:
            torch.cuda.nvtx.range_pop()
        else:
            recorded.__exit__(None, None, None)
