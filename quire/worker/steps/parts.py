"""What steps of every kind are made of: the forward pass, sampling, commit, and the way back to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from quire.attention.context import StepContext
from quire.distributed.group import Group
from quire.kernels.across_ranks import from_first, gather_columns
from quire.kernels.step.step import commit
from quire.models.base import Decoder, DecoderStack, GivenEmbeddings
from quire.types.plan import StepPlan, TokenMasks
from quire.worker.adapters import Adapters
from quire.worker.batch import Batch, BatchBuilder, round_size
from quire.worker.kv_store import KVStore
from quire.worker.layer_groups import LayerGroups
from quire.worker.logit_rows import logit_rows
from quire.worker.mixed_graphs import MAX_PROMPTS
from quire.worker.readback import Readback, StepHandle
from quire.worker.sampling.follower import Follower
from quire.worker.sampling.logprobs import LogprobTensors
from quire.worker.sampling.masks import Masks
from quire.worker.sampling.sampler import Features, History, Sampler
from quire.worker.seat_drafts import SeatDrafts
from quire.worker.seats import DeviceSeats
from quire.worker.shared_prompts import OwnPart, SharedPrompts
from quire.worker.staging import Staging
from quire.worker.streams import Streams

Sample = Callable[[TokenMasks | None], StepHandle]  # the second half of a step: everything after the logits
NOTHING: Mapping[str, LogprobTensors] = {}


class StepParts:
    """max_rows: of any plan; padded_rows: of the largest step with prompt chunks that is padded to the size of a graph.
    drafts: None: nothing is drafted. group: None: this is the only rank. adapters: None: there are none.
    """

    def __init__(
        self,
        model: Decoder,
        groups: LayerGroups,
        store: KVStore,
        seats: DeviceSeats,
        builder: BatchBuilder,
        sampler: Sampler | Follower,
        *,
        max_rows: int,
        padded_rows: int,
        staging_capacity: int,
        device: torch.device,
        streams: Streams,
        drafts: SeatDrafts | None = None,
        group: Group | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.model = model
        self.layers: int | None = None  # 1: for trials, steps go through one layer of each make
        self.adapters = adapters
        self.groups = groups
        self.store = store
        self.seats = seats
        self.builder = builder
        self.sampler = sampler
        self.history = History(store.token_of_slot, seats.state.block_table, seats.state.block_size)
        self.staging = Staging(staging_capacity, device)
        self.drafts = drafts
        self.readback = Readback(max_rows, streams.readback, columns=drafts.outcome.shape[1] if drafts else 0)
        drafted_tokens = drafts.max_tokens if drafts else 0
        most = max(max_rows + MAX_PROMPTS, drafted_tokens)
        self.sampled = torch.zeros(most, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(max_rows + MAX_PROMPTS, dtype=torch.int32, device=device)
        self._group = group if group and (group.topology.size > 1 or group.contexts) else None
        self.pipeline = group.pipeline if group else None
        contexts = group.contexts if group else None
        self._shared = SharedPrompts(contexts, seats.num_computed_np, builder.padded) if contexts else None
        if self.pipeline:
            self.pipeline.drain()  # of another runner
        rows = max(round_size(max_rows), drafted_tokens, padded_rows)
        shared = group.peers.logits if group and group.peers else None
        self.logits = (
            logit_rows(rows, sampler.vocab_size if self.is_last else 0, device) if shared is None else shared[:rows]
        )

    # -- to the logits ------------------------------------------------------------------------------------------

    @property
    def is_last(self) -> bool:
        """Whether logits are made here, and not by a later stage."""
        return self.pipeline is None or self.pipeline.is_last

    def begin(self, plan: StepPlan) -> None:
        """See to it that the tokens of the plan's decode rows are here, if another stage samples them."""
        if self.pipeline:
            self.pipeline.begin(plan.step, plan.seats[: plan.num_decodes], self.seats.state.last_token)

    def receive(self, batch: Batch) -> None:
        """Before the step's forward pass."""
        if self.pipeline:
            self.pipeline.receive(batch.num_tokens)

    def send(self, batch: Batch) -> None:
        """Behind it."""
        if self.pipeline:
            self.pipeline.send(batch.num_tokens)

    def own_part(self, plan: StepPlan, batch: Batch) -> OwnPart | None:
        """What of an eager step this copy of the model computes, where several share long prompts; None: all."""
        return None if self._shared is None else self._shared.part(plan, batch)

    def forward(
        self,
        batch: Batch,
        layers: int | None = None,
        given: GivenEmbeddings | None = None,
        own: OwnPart | None = None,
    ) -> torch.Tensor:
        """The residual stream after the last layer, [tokens, hidden]; of all tokens, whoever computes them."""
        layers = layers or self.layers
        if own is not None:
            return self._forward_own(batch, layers, given, own)
        if self.adapters is not None:
            self.adapters.find_rows(batch, self.seats)
        context = StepContext(
            positions=batch.buffers.positions,
            caches=self.store.layers,
            groups=self.groups.contexts(batch),
        )
        pipeline = self.pipeline
        if pipeline is None:
            return self.model.forward(batch.buffers.input_ids, context, layers, given)
        assert isinstance(self.model, DecoderStack)
        residual = None if pipeline.is_first else pipeline.inbox[: batch.num_tokens]
        hidden = self.model.forward(batch.buffers.input_ids, context, layers, given, residual)
        if not pipeline.is_last:
            pipeline.outbox[: batch.num_tokens].copy_(hidden)
        return hidden

    def _forward_own(
        self, batch: Batch, layers: int | None, given: GivenEmbeddings | None, own: OwnPart
    ) -> torch.Tensor:
        if self.adapters is not None:
            self.adapters.find_rows(own.batch, self.seats)
        context = StepContext(
            positions=own.batch.buffers.positions,
            caches=own.caches(self.store.layers),
            groups=self.groups.contexts(batch, own),
        )
        hidden = self.model.forward(own.batch.buffers.input_ids, context, layers, own.given(given))
        if self.adapters is not None:  # what follows is of the step's tokens again
            self.adapters.find_rows(batch, self.seats)
        return own.whole(hidden)

    def write_logits(
        self, hidden: torch.Tensor, tokens: torch.Tensor | None = None, *, before_tail: bool = False
    ) -> None:
        """tokens: int32 [rows], those of the step whose logits are wanted; None: all. before_tail: ranks that draw
        apart leave them in parts, see `gather_unless_plain`."""
        if not self.is_last:
            return
        if tokens is not None:
            with self.narrowed(tokens):
                self.write_logits(hidden.index_select(0, tokens), before_tail=before_tail)
        elif self.sampler.apart is None:
            self.model.logits(hidden, out=self.logits[: len(hidden)])
        else:
            self.model.own_logits(hidden, out=self.sampler.apart.part(len(hidden)))
            if not before_tail:
                self._gather(len(hidden))

    def _gather(self, rows: int) -> None:
        """Ranks' parts of the logits become the first one's."""
        if self.sampler.apart is not None and self._group is not None and self.is_last and rows:
            gather_columns(self.sampler.apart.part(rows), self.logits[:rows], self._group)

    def narrowed(self, tokens: torch.Tensor | slice) -> AbstractContextManager[None]:
        """Some of the step's tokens alone go on, as far as adapters are concerned."""
        return nullcontext() if self.adapters is None else self.adapters.active.narrowed(tokens)

    @property
    def has_adapters(self) -> bool:
        """Whether some row of the step has one."""
        return self.adapters is not None and self.adapters.is_on

    @property
    def forbids_graphs(self) -> bool:
        """Whether the step has to run from Python."""
        return self.adapters is not None and self.adapters.forbids_graphs

    def for_graphs(self, adapted: bool) -> AbstractContextManager[None]:
        """While graphs are made of steps with adapters, or without."""
        return nullcontext() if self.adapters is None else self.adapters.as_if(adapted)

    # -- from the logits ----------------------------------------------------------------------------------------

    def gather_unless_plain(self, plan: StepPlan, seats: np.ndarray) -> bool:
        """Behind a forward graph: whether its logits were in parts and had to be brought together, as some row of the
        plan wants more than a draw. If so, the tail that filters goes on. seats: of the rows that are due."""
        if self.sampler.apart is None or self.sampler.apart.suffice(plan, seats):
            return False
        self._gather(len(seats))
        return True

    def sample_in_tail(self, seats: torch.Tensor, lengths: torch.Tensor, rows: int, *, filtered: bool) -> torch.Tensor:
        """Of the first rows of logits, int32 [rows]: the same tokens on every rank. Where ranks draw from their parts,
        logits are whole if `filtered`."""
        sampled = self.sampled[:rows]
        if self.sampler.apart is None or filtered:
            self.sampler.sample_plain(self.logits[:rows], seats, lengths, sampled, filtered=filtered)
            return self.agreed(sampled)
        if self.is_last:
            self.sampler.apart.draw(seats, lengths, sampled)
        return sampled

    def sample_eagerly(
        self, plan: StepPlan, batch: Batch, answers: Mapping[str, LogprobTensors], masks: TokenMasks | None
    ) -> StepHandle:
        """From the logits of the rows that are due, if there are any. answers: of features, see StepFeature."""
        rows = batch.sample_rows_np
        logprobs = None
        if len(rows):
            seats = plan.seats[rows]
            found = self.sampler.masks(masks, rows)
            logprobs = self.sample(batch, seats, self.logits[: len(rows)], self.sampler.features(seats), found)
        else:
            self.commit(batch, self.sampled[:0])
        return self.read_back(plan, logprobs, answers)

    def sample(
        self, batch: Batch, seats_np: np.ndarray, logits: torch.Tensor, features: Features, masks: Masks | None
    ) -> LogprobTensors | None:
        """Sample the rows that are due and commit; log-probabilities name plan rows."""
        rows = batch.sample_rows
        seats = batch.seats if rows is None else batch.seats.index_select(0, rows)
        lengths = batch.buffers.seq_lens if rows is None else batch.buffers.seq_lens.index_select(0, rows)
        sampled, logprobs = self.draw(logits, seats, lengths, features, seats_np, masks)
        self.commit(batch, sampled)
        if logprobs is None or rows is None:
            return logprobs
        return logprobs.with_rows(rows.index_select(0, logprobs.rows.to(rows.device)))

    def draw(
        self,
        logits: torch.Tensor,
        seats: torch.Tensor,
        lengths: torch.Tensor,
        features: Features,
        seats_np: np.ndarray,
        masks: Masks | None,
        queries: int = 1,
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Tokens, int32 [rows], and log-probabilities of rows of logits; see `Sampler.sample`."""
        if features.plain:
            if masks is not None:
                masks.apply(logits)
            sampled = self.sampled[: len(seats_np)]
            self.sampler.sample_plain(logits, seats, lengths, sampled)
            return sampled, None
        output = self.sampler.sample(logits, seats, lengths, self.history, features, seats_np, masks, queries)
        return output.token_ids[:, 0].contiguous(), output.logprobs

    def commit(self, batch: Batch, sampled: torch.Tensor) -> None:
        """The end of a step that no graph holds."""
        self.readback.before_commit()
        self.write_tokens(batch, self.agreed(sampled))

    def write_tokens(self, batch: Batch, sampled: torch.Tensor) -> None:
        """What all ranks agree on becomes the seats' last tokens, and drafts are made from there. Part of tails too."""
        tokens = self.tokens[: batch.num_rows]
        commit(self.seats.state, tokens, batch.seats, batch.buffers.seq_lens, sampled, batch.sample_index)
        if self.drafts:
            self.drafts.follow(batch.seats, tokens, batch.attention.num_decodes)

    def agreed(self, sampled: torch.Tensor) -> torch.Tensor:
        """The same tokens on every rank: the first one's. Ranks may pad differently, so as many as there can be."""
        if self._group is None or not len(sampled) or not self.is_last:
            return sampled
        ours = self.sampled[: len(sampled)]
        if ours.data_ptr() != sampled.data_ptr():
            ours.copy_(sampled)
        from_first(self.sampled, self._group)
        return ours

    def read_back(
        self,
        plan: StepPlan,
        logprobs: LogprobTensors | None,
        answers: Mapping[str, LogprobTensors] = NOTHING,
        first: int = 0,
    ) -> StepHandle:
        """first: the plan's row 0 among those of the step."""
        failures = self.sampler.take_failures(plan.seats)
        tokens = (self.drafts.outcome if self.drafts else self.tokens)[first:]
        if self.pipeline:
            self.pipeline.sample(plan.step, plan.seats, plan.samples, tokens[: plan.num_rows])
        return self.readback.start(plan, tokens, logprobs, answers, failures)
