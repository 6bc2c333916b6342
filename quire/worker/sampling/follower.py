"""The sampler of a rank whose tokens are another's: it looks at nothing, and what it draws is written over.

One rank samples and the others take its tokens. So nothing that could differ between ranks (a user's logits processor,
above all) can make them drift apart, masks have one place to go, and no rank but the first needs whole logits.
"""

from __future__ import annotations

from typing import Any

from quire.worker.sampling.columns import Features
from quire.worker.sampling.sampler import SamplerOutput

_NOTHING = Features(filter=False, penalties=False, lists=False, logprobs=False, custom=False)


class Follower:
    """As `Sampler` to its runner."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def admit(self, *_: Any) -> None: ...

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
