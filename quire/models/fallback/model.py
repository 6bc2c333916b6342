"""A causal language model of transformers, as the worker sees any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.foundation.errors import ConfigError
from quire.foundation.log import get_logger
from quire.layers.targets import Target
from quire.models.base import Decoder, GivenEmbeddings
from quire.models.fallback.attention import LOOKING, SERVING, Door, PagedAttention, Recorder, Site, hang, use
from quire.models.fallback.checkpoint import Checkpoint
from quire.models.fallback.checks import check_attention, check_tokens, waits_for_device
from quire.models.fallback.fuse import fuse
from quire.models.fallback.norms import fuse_norms
from quire.models.fallback.trunk import Trunk, find_trunk

_log = get_logger(__name__)


class TransformersModel(Decoder):
    """causal: the model, on its device, its weights not set. max_positions: of a text. vocab_size: as config.json says.

    Its forward pass is its class's own. What attends is the paged cache; where it goes on from its trunk's states to
    logits it is stopped, and later gone through once more for the rows whose logits are wanted.
    Raises ConfigError for a class that cannot be served, naming what of it.
    """

    graph_support = False  # until it is known
    is_foreign = True
    may_be_rehearsed = False  # nor is this: nothing of a class's own may look things up by numbers that mean nothing

    def __init__(self, causal: Any, max_positions: int, vocab_size: int) -> None:
        super().__init__()
        self.causal, self.file_name = causal, str
        self.name = type(causal).__name__
        self._max_positions, self._vocab_size = max_positions, vocab_size
        self._device = next(causal.parameters()).device
        self._sites, self._trunk = self._look()
        kinds = sorted({site.kind for site in self._sites}, key=lambda kind: (kind[0].kind != "full", repr(kind)))
        self._keeps, self.scores = [keeps for keeps, _ in kinds], [scores for _, scores in kinds]
        self.layer_groups = [kinds.index(site.kind) for site in self._sites]
        heads = {site.heads for site in self._sites}
        if len(heads) > 1:
            raise ConfigError(f"{self.name} has layers of {sorted(heads)} heads, which is not supported", "model_impl")
        (self.num_heads,) = heads
        self.hidden = self._trunk.hidden
        self._paged = PagedAttention(self._sites, self.layer_groups, self._device)
        self._door.attends = self._paged
        self._checkpoint = Checkpoint(causal)

    @torch.inference_mode()
    def _look(self) -> tuple[list[Site], Trunk]:
        """Go through the model once, to see what attends and where its logits begin."""
        names = {module: f"{self.name}'s {path}" for path, module in self.causal.named_modules()}
        recorder = Recorder(names, self._max_positions)
        self._door = Door(recorder)
        hang(self.causal, self._door)
        use(self.causal, LOOKING)
        ids = torch.arange(min(3, self._max_positions), device=self._device)[None]
        # Without one, positions are looked at for rows side by side, which asks what a number is.
        padding = {"attention_mask": torch.ones_like(ids)} if self._device.type == "meta" else {}
        try:
            trunk, logits = find_trunk(
                self.causal,
                lambda: len(recorder.sites),
                input_ids=ids.clamp(max=self._vocab_size - 1),
                position_ids=ids,
                use_cache=False,
                **padding,
            )
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            told = "cannot be judged unless it runs"
            if self._device.type != "meta":
                told = "does not run on packed rows with their positions"
            raise ConfigError(
                f"{self.name} {told}: {type(error).__name__}: {error}",
                "model_impl",
            ) from error
        use(self.causal, SERVING)
        if not recorder.sites or trunk is None:
            raise ConfigError(
                f"{self.name} does not attend through transformers' attention interface, so not over a paged cache",
                "model_impl",
            )
        if logits.shape[-1] != self._vocab_size:
            raise ConfigError(
                f"config.json: {self.name} has logits of {logits.shape[-1]} tokens, and vocab_size={self._vocab_size}",
                "vocab_size",
            )
        return recorder.sites, trunk

    # -- steps --------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: torch.Tensor,
        ctx: StepContext,
        layers: int | None = None,  # noqa: ARG002 (all of them, always)
        given: GivenEmbeddings | None = None,
    ) -> torch.Tensor:
        """input_ids int32 [tokens] → the trunk's last states, [tokens, hidden]. given: what some tokens are instead of
        their ids' embeddings."""
        self._paged.begin(ctx)
        try:
            return self._states(input_ids, ctx.positions, given)
        finally:
            self._paged.end()

    def _states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, given: GivenEmbeddings | None = None
    ) -> torch.Tensor:
        ids, places = input_ids.long()[None], positions.long()[None]
        if given is None:
            return self._trunk.states(input_ids=ids, position_ids=places, use_cache=False)
        embedded = self.causal.get_input_embeddings()(ids)
        embedded[0].index_copy_(0, given.tokens, given.values)
        return self._trunk.states(inputs_embeds=embedded, position_ids=places, use_cache=False)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(len(hidden), self._vocab_size, dtype=torch.float32, device=hidden.device)
        return out.copy_(self._trunk.logits(hidden)) if len(hidden) else out

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    # -- weights ------------------------------------------------------------------------------------------------

    def known_name(self, tensor: str) -> str | None:
        return self._checkpoint.known_name(tensor)

    def targets_in(self, stored: Mapping[str, tuple[int, ...]]) -> Iterable[Target]:
        """See HasForms."""
        return self._checkpoint.targets(stored)

    @property
    def twins(self) -> dict[str, str]:
        return self._checkpoint.twins

    def prompt_weights(self) -> int:
        ends = {
            id(parameter)
            for end in (self.causal.get_input_embeddings(), self.causal.get_output_embeddings())
            if isinstance(end, nn.Module)
            for parameter in end.parameters()
        }
        return max(1, sum(int(p.numel()) for p in self.causal.parameters() if id(p) not in ends))

    @torch.inference_mode()
    def check(self) -> None:
        """Whether tokens meet in attention alone, and each where its position says; whether attention is what the class
        says; whether a step waits for the device. A few forward passes of three tokens."""
        fuse_norms(self.causal)
        try:
            check_tokens(self.name, self._door, self._states, self._device, self._vocab_size, self._max_positions)
            check_attention(self.name, self._door, self._states, self._device, self._sites)
            fused = fuse(self.causal, self._door, self._states, self._sites, self._paged, self._max_positions)
            self._checkpoint = Checkpoint(self.causal)  # the one before holds what matrices were made of
            why = waits_for_device(self._door, self._states, self._trunk.logits, self._device)
        finally:
            self._door.attends = self._paged
        self.graph_support = why is None
        self.may_be_rehearsed = self.graph_support and fused.layers == len(self._sites)
        _log.info(
            "of %s %d layers, %d attention and %d feed-forward parts and %d products besides are computed by Quire's "
            "kernels",
            self.name, fused.layers, fused.attention, fused.feed_forward, fused.products,
        )  # fmt: skip
        if why and self._device.type == "cuda":
            _log.info("steps of %s are launched from Python, without graphs: %s", self.name, why)
