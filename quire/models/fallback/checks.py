"""What is found out about a model of transformers by asking it: three tokens at a time, nothing of them kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quire.attention.base import PerHead
from quire.attention.scored import attend
from quire.foundation.errors import ConfigError
from quire.models.fallback.attention import Door, Site, own_value, terms_of
from quire.models.fallback.distance import distance

States = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # ids, positions → states


class _Alone:
    """Each token sees but itself; what comes in is noted."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(
        self,
        module: nn.Module,  # noqa: ARG002
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,  # noqa: ARG002
        scale: float | None,  # noqa: ARG002
        others: Mapping[str, Any],  # noqa: ARG002
    ) -> torch.Tensor:
        self.seen += [x[0].transpose(0, 1).flatten(1) for x in (q, k, v)]
        return own_value(q, v)


def check_tokens(
    name: str, door: Door, states: States, device: torch.device, vocab_size: int, max_positions: int
) -> None:
    """Rows of a step lie side by side and prompts come in chunks. So tokens may meet in attention alone, and where one
    stands may be said by its position only. Raises ConfigError if it is not so.

    With attention out of the way, three equal tokens at one position must be computed alike, and two of them must stay
    as they are when the first one becomes another somewhere else.
    """
    if vocab_size < 2 or max_positions < 2:
        return
    one, other, here, there = vocab_size // 3, vocab_size - 1, min(5, max_positions - 1), 0

    def run(ids: list[int], positions: list[int]) -> list[torch.Tensor]:
        door.attends = alone = _Alone()
        made = states(torch.tensor(ids, device=device), torch.tensor(positions, device=device))
        return [*alone.seen, made]

    alike = run([one] * 3, [here] * 3)
    if any(_differ(x[0], x[1]) or _differ(x[0], x[2]) for x in alike):
        raise ConfigError(
            f"{name} counts its tokens itself, or mixes them outside of attention: it cannot run rows side by side",
            "model_impl",
        )
    moved = run([other, one, one], [there, here, here])
    if any(_differ(x[1:], y[1:]) for x, y in zip(alike, moved, strict=True)):
        raise ConfigError(
            f"{name} mixes tokens outside of attention (a state, a convolution …): what it would keep of them has "
            "no place in the cache",
            "model_impl",
        )


class _Compared:
    """Attention of a few tokens as the class has it, compared with what backends compute."""

    def __init__(self, name: str, sites: list[Site]) -> None:
        self._name, self._sites, self._place = name, sites, 0

    def __call__(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,  # noqa: ARG002
        scale: float | None,
        others: Mapping[str, Any],
    ) -> torch.Tensor:
        site, self._place = self._sites[self._place], self._place + 1
        tokens = torch.arange(q.shape[2], device=q.device)
        sees = site.scores.visible(tokens, tokens[:, None])
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
        heads = PerHead(*(None if one is None else one[:, None, None] for one in terms_of(others)))
        ours = attend(q, keys, values, sees, scale=site.scale, scores=site.scores, heads=heads)
        ours = ours.transpose(1, 2).contiguous()
        own = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
        if own is not None:
            added = torch.zeros(1, 1, *sees.shape, dtype=q.dtype, device=q.device)
            added.masked_fill_(~sees, torch.finfo(q.dtype).min)
            theirs = own(module, q, k, v, added, scaling=scale, **{"dropout": 0.0, **others})[0]
            if _differ(ours, theirs.reshape(ours.shape)):
                raise ConfigError(
                    f"{self._name} attends otherwise than by scaled products of queries and keys: its "
                    f"{type(module).__name__} is not supported",
                    "model_impl",
                )
        return ours


def check_attention(name: str, door: Door, states: States, device: torch.device, sites: list[Site]) -> None:
    """Attention functions are told but a part of what a class may do. Raises ConfigError if its own, which it has for
    the plainest case, computes something else than ours."""
    door.attends = _Compared(name, sites)
    ids = torch.arange(3, device=device)
    states(ids, ids)


def waits_for_device(
    door: Door, states: States, logits: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> str | None:
    """What keeps the forward pass out of CUDA graphs; None if nothing does."""
    if device.type != "cuda":
        return "they are for NVIDIA GPUs"
    door.attends = _Alone()
    ids = torch.zeros(3, dtype=torch.int32, device=device)
    logits(states(ids, ids))  # what is made at the first time may wait
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits(states(ids, ids))
    except RuntimeError as error:
        return f"it waits for the device ({str(error).splitlines()[0]})"
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return None


def _differ(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """By more than rounding."""
    return distance(ours, theirs).largest > (1e-3 if ours.dtype == torch.float32 else 3e-2)
