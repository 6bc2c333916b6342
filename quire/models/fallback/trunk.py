"""Where a model's states end and its logits begin, without knowing its class.

A causal language model calls one module that has all its layers, and makes logits of what that returns. Steps want the
states of all tokens and the logits of few rows. So the model's own forward pass is stopped behind its trunk; and for
logits it is gone through with the trunk's place taken by states. Whatever the class does around its trunk is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quire.foundation.errors import ConfigError


class _Reached(Exception):  # noqa: N818 (nothing is wrong)
    """The trunk has returned."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs


class Trunk:
    """module: the trunk of `causal`. outputs: what it returned once."""

    def __init__(self, causal: nn.Module, module: nn.Module, outputs: Any) -> None:
        # Neither is a part of this one.
        self._causal, self._kind = causal, type(outputs)
        self._given: torch.Tensor | None = None
        self.hidden = int(outputs[0].shape[-1])
        original: Callable[..., Any] = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._given is not None:
                return self._outputs(self._given)
            raise _Reached(original(*args, **kwargs))

        module.forward = forward

    def _outputs(self, states: torch.Tensor) -> Any:
        return (states,) if issubclass(self._kind, tuple) else self._kind(last_hidden_state=states)

    def states(self, **inputs: Any) -> torch.Tensor:
        """The states of all tokens, [tokens, hidden]."""
        try:
            self._causal(**inputs)
        except _Reached as reached:
            states: torch.Tensor = reached.outputs[0]
            return states[0]
        raise RuntimeError("a model of transformers did not come through its trunk")

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """states [rows, hidden] → [rows, vocab], as the class makes them."""
        ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        self._given = states[None]
        try:
            found: torch.Tensor = _logits(self._causal(input_ids=ids, use_cache=False))
        finally:
            self._given = None
        return found[0]


def find_trunk(causal: nn.Module, attended: Callable[[], int], **inputs: Any) -> tuple[Trunk | None, torch.Tensor]:
    """The module that `causal` calls for all its attention, and its logits; None if there is none such.

    attended: how often there was attention so far. Raises ConfigError if the class attends outside of its trunk.
    """
    depth, before = 0, 0
    found: list[tuple[nn.Module, Any]] = []

    def enter(module: nn.Module, args: Any) -> None:  # noqa: ARG001
        nonlocal depth, before
        if module is causal:
            return
        before = attended() if depth == 0 else before
        depth += 1

    def leave(module: nn.Module, args: Any, outputs: Any) -> None:  # noqa: ARG001
        nonlocal depth
        if module is causal:
            return
        depth -= 1
        if depth == 0 and attended() > before:
            found.append((module, outputs))

    hooks = []
    for module in causal.modules():
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        logits = _logits(causal(**inputs))
    finally:
        for hook in hooks:
            hook.remove()
    if len(found) > 1:
        raise ConfigError(
            f"{type(causal).__name__} runs its layers beside its logits: no one trunk has all states",
            "model_impl",
        )
    return (Trunk(causal, *found[0]) if found else None), logits


def _logits(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = outputs.logits if hasattr(outputs, "logits") else outputs[0]
    return found
