"""The sampler of a rank whose tokens are another's: it looks at nothing, and what it draws is written over.

One rank samples and the others take its tokens. So nothing that could differ between ranks (a user's logits processor,
above all) can make them drift apart, masks have one place to go, and no rank but the first needs whole logits.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.sampling import History
from quire.types.plan import Admit, TokenMasks
from quire.worker.sampling.columns import Features
from quire.worker.sampling.masks import Masks
from quire.worker.sampling.sampler import SamplerOutput

_NOTHING = Features(filter=False, penalties=False, lists=False, logprobs=False, custom=False)


class Follower:
    """As `Sampler` to its runner."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def admit(self, admits: list[Admit]) -> None: ...

    def take_failures(self, seats: np.ndarray) -> dict[int, str]:  # noqa: ARG002 (a sampler's)
        return {}

    def features(self, seats: np.ndarray) -> Features:  # noqa: ARG002 (a sampler's)
        return _NOTHING

    def masks(self, masks: TokenMasks | None, sample_rows: np.ndarray | None) -> Masks | None:  # noqa: ARG002 (a sampler's)
        return None

    def sample_plain(
        self,
        logits: torch.Tensor,
        seats: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        *,
        filtered: bool = False,
    ) -> None: ...

    def sample(
        self,
        logits: torch.Tensor,
        seats: torch.Tensor,
        lengths: torch.Tensor,
        history: History,
        features: Features,
        seats_np: np.ndarray,
        masks: Masks | None = None,
    ) -> SamplerOutput:
        raise AssertionError("a step of a follower asks for nothing")
