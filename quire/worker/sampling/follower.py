"""The sampler of a rank whose tokens are another's: it looks at no logits, and what it draws is written over.

One rank samples and the others take its tokens, but in steps that want nothing but draws (`ApartDraws`). So nothing
that could differ between ranks (a user's logits processor, above all) can make them drift apart, masks have one place
to go, and no rank but the first needs whole logits.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.distributed.peer_memory import PeerMemory
from quire.types.plan import Admit
from quire.worker.sampling.apart import ApartDraws
from quire.worker.sampling.columns import Columns, Features
from quire.worker.sampling.sampler import SamplerOutput

_NOTHING = Features(filter=False, penalties=False, lists=False, logprobs=False, custom=False)


class Follower:
    """As `Sampler` to its runner. It knows what seats want, for steps whose tokens all ranks draw (`ApartDraws`)."""

    def __init__(self, max_seats: int, vocab_size: int, device: torch.device, peers: PeerMemory | None = None) -> None:
        self.vocab_size = vocab_size
        self.columns = Columns(max_seats, vocab_size, device)
        self.apart = ApartDraws(self.columns, peers) if peers else None

    def admit(self, admits: list[Admit]) -> None:
        self.columns.admit(admits)

    def custom_seats(self, *_: Any) -> list[int]:
        return []

    def take_failures(self, *_: Any) -> dict[int, str]:
        return {}

    def features(self, *_: Any) -> Features:
        return _NOTHING

    def masks(self, *_: Any) -> None:
        return None

    def sample_plain(self, *_: Any, **__: Any) -> None: ...

    def sample(self, *_: Any) -> SamplerOutput:
        raise AssertionError("a step of a follower asks for nothing")
