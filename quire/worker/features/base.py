"""Features that few steps need, around the forward pass: found by the attachments of a plan, one file each.

A step with one runs from Python: graphs hold nothing but the plain way. What acts between logits and sampling is the
sampler's (`worker/sampling`), and needs no attachment.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from quire.foundation.registry import Registry
from quire.models.base import Decoder, GivenEmbeddings
from quire.types.plan import StepPlan
from quire.worker.sampling.logprobs import LogprobTensors

STEP_FEATURES = Registry(
    "step feature",
    {  # tag of the attachment → who acts on it
        "prompt_embeds": "quire.worker.features.prompt_embeds:PromptEmbeddings",
        "prompt_logprobs": "quire.worker.features.prompt_logprobs:PromptScorer",
    },
    contract="quire.worker.features.base:StepFeature",
    needs=("before_forward", "after_forward"),
    is_class=True,
)


@dataclass(frozen=True, slots=True)
class FeatureSetup:
    """What a feature is made with."""

    model: Decoder
    vocab_size: int
    narrowed: Callable[[slice], AbstractContextManager[None]] = lambda _: nullcontext()
    """While some of the step's tokens alone go to the model's head, a slice of them."""


class StepFeature:
    """Derive, and override what is needed. One object serves a runner, and is made when a plan first asks for it.

    Nothing may wait for the device.
    """

    def __init__(self, setup: FeatureSetup) -> None:
        self.setup = setup

    def before_forward(self, plan: StepPlan, wanted: Any) -> GivenEmbeddings | None:  # noqa: ARG002 (for those who do)
        """What some tokens of the step are instead of their ids' embeddings. wanted: the plan's attachment."""
        return None

    def after_forward(
        self,
        plan: StepPlan,  # noqa: ARG002
        wanted: Any,  # noqa: ARG002
        hidden: torch.Tensor,  # noqa: ARG002
        input_ids: torch.Tensor,  # noqa: ARG002
    ) -> LogprobTensors | None:
        """What goes into the field of StepResult that is named like the attachment's tag.

        Args:
            plan: of the step.
            wanted: its attachment.
            hidden: the residual stream after the last layer; rows behind the plan's tokens are padding.
            input_ids: of the same tokens.

        Shapes:
            hidden: [tokens, hidden]; input_ids: int32 [tokens].
        """
        return None


class StepFeatures:
    """Those that plans have asked for so far."""

    def __init__(self, setup: FeatureSetup) -> None:
        self._setup = setup
        self._made: dict[str, StepFeature] = {}

    def of(self, plan: StepPlan) -> list[tuple[str, StepFeature, Any]]:
        """Tag, feature and attachment of each that the plan wants; attachments of others are not theirs."""
        found = []
        for attachment in plan.attachments:
            tag = str(attachment.__struct_config__.tag)
            feature = self._made.get(tag)
            if feature is None and tag in STEP_FEATURES:
                feature = self._made[tag] = STEP_FEATURES.get(tag)(self._setup)
            if feature is not None:
                found.append((tag, feature, attachment))
        return found
