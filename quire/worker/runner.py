"""One plan in, one result out, and never a wait for the device in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from quire.attention.context import StepContext
from quire.distributed.group import Group
from quire.kernels.across_ranks import from_first
from quire.kernels.step.step import commit, gather_decode
from quire.models.base import DecoderStack, GivenEmbeddings
from quire.types.kv import DraftCost
from quire.types.plan import PromptLogprobs, StepPlan, TokenMasks
from quire.worker.batch import Batch, BatchBuilder, round_size
from quire.worker.graphs import DecodeGraphs, DecodeSize, DraftedGraphs, DraftedSize
from quire.worker.kv_store import KVStore
from quire.worker.layer_groups import LayerGroups
from quire.worker.masked_step import MaskedStep
from quire.worker.mixed_graphs import MAX_PROMPTS, MixedGraphs, MixedSize
from quire.worker.padded import PaddedSteps
from quire.worker.prefixes import PrefixLayout
from quire.worker.prompt_embeds import given_embeddings
from quire.worker.prompt_logprobs import PromptScorer
from quire.worker.readback import Readback, StepHandle
from quire.worker.sampling.follower import Follower
from quire.worker.sampling.logprobs import LogprobTensors
from quire.worker.sampling.masks import Masks
from quire.worker.sampling.sampler import Features, History, Sampler
from quire.worker.seat_drafts import SeatDrafts
from quire.worker.seats import DeviceSeats
from quire.worker.staging import Staging
from quire.worker.streams import Streams

Sample = Callable[[TokenMasks | None], StepHandle]  # the second half of a step: everything after the logits


class Runner:
    """Runs plans in order on one stream.

    A decode step is: changed seats (if any) → forward graph → tail graph → readback; when rows share prefixes, the
    forward graph is one that reads these once. So is a small step with prompt chunks, once its rows have been copied to
    where its graph reads them. Any other step runs the same code from Python. Rows that want their logits edited or
    log-probabilities leave the tail graph out and sample eagerly. A step that awaits masks stops at its logits; masks
    are applied to these in place, and it goes on as it would have without.
    """

    def __init__(
        self,
        model: DecoderStack,
        groups: LayerGroups,
        store: KVStore,
        seats: DeviceSeats,
        builder: BatchBuilder,
        sampler: Sampler | Follower,
        *,
        max_rows: int,
        staging_capacity: int,
        device: torch.device,
        streams: Streams,
        decode_sizes: list[DecodeSize],
        padded: PaddedSteps | None,
        drafts: SeatDrafts | None = None,
        drafted_sizes: Sequence[DraftedSize] = (),
        group: Group | None = None,
    ) -> None:
        self.model = model
        self._groups = groups
        self._store = store
        self._seats = seats
        self._builder = builder
        self._sampler = sampler
        self._history = History(store.token_of_slot, seats.state.block_table, seats.state.block_size)
        self._prompt_scorer = PromptScorer(model, sampler.vocab_size)
        self._staging = Staging(staging_capacity, device)
        self._drafts = drafts  # None: nothing is drafted
        self._readback = Readback(max_rows, streams.readback, columns=drafts.outcome.shape[1] if drafts else 0)
        self._device = device
        self._stream = streams.compute
        drafted_tokens = drafts.max_tokens if drafts else 0
        most = max(max_rows + MAX_PROMPTS, drafted_tokens)
        self._sampled = torch.zeros(most, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_rows + MAX_PROMPTS, dtype=torch.int32, device=device)
        rows = [round_size(max_rows), drafted_tokens, *(size.rows for size in (padded.sizes if padded else ()))]
        self._group = group
        shared = group.peers.logits if group and group.peers else None
        self._logits = (
            torch.empty(max(rows), sampler.vocab_size, dtype=torch.float32, device=device)
            if shared is None
            else shared[: max(rows)]
        )
        self.graphs = self.mixed_graphs = self.drafted_graphs = None
        if self._stream:  # weights and buffers are being written on the stream that is current here
            self._stream.wait_stream(torch.cuda.current_stream(device))
            if decode_sizes:
                self.graphs = DecodeGraphs(decode_sizes)
            if drafted_sizes:
                self.drafted_graphs = DraftedGraphs(drafted_sizes)
            if padded:
                self._padded = padded
                self.mixed_graphs = MixedGraphs(padded.sizes)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Everything that touches device state runs here: one stream is the order of all readers and writers."""
        with torch.inference_mode():
            if self._stream is None:
                yield
            else:
                with torch.cuda.stream(self._stream):
                    yield

    @property
    def mixed_sizes(self) -> list[tuple[int, int]]:
        """See WorkerReport."""
        sizes = self.mixed_graphs.sizes if self.mixed_graphs else []
        return [(size.decodes, size.tokens) for size in sizes if not size.shares_prefix]

    def capture(self) -> float:
        """Capture all graphs into one pool, the largest first; seconds it took."""
        if self._stream is None:
            return 0.0
        pool = torch.cuda.graph_pool_handle()
        seconds = 0.0
        with self.on_stream():
            if self.mixed_graphs:
                seconds += self.mixed_graphs.capture(self._forward_padded, self._tail_padded, pool)
            if self.graphs:
                seconds += self.graphs.capture(self._forward_decode, self._tail_decode, pool)
            if self.drafted_graphs:
                seconds += self.drafted_graphs.capture(self._forward_drafted, self._tail_drafted, pool)
        return seconds

    @property
    def max_drafted_rows(self) -> int:
        """See WorkerReport."""
        return self._drafts.max_rows if self._drafts else 0

    def draft_costs(self) -> list[DraftCost]:
        """See WorkerReport: what graphs take whose rows all sit on the padding seat. Waits."""
        drafted, plain = self.drafted_graphs, self.graphs
        if drafted is None or plain is None or not (drafted.captured and plain.captured):
            return []
        costs = []
        with self.on_stream():
            for size in reversed(drafted.sizes):
                without = plain.size_for(size.rows, shares_prefix=False)
                if without is not None:
                    costs.append(DraftCost(size.rows, plain.seconds(without), drafted.seconds(size)))
        return costs

    def rehearse(self) -> None:
        """Launch what the graphs will hold, for whoever compiles kernels ahead of them."""
        with self.on_stream():
            if self.mixed_graphs:
                self.mixed_graphs.rehearse(self._forward_padded, self._tail_padded)
            if self.graphs:
                self.graphs.rehearse(self._forward_decode, self._tail_decode)
            if self.drafted_graphs:
                self.drafted_graphs.rehearse(self._forward_drafted, self._tail_drafted)

    def run(self, plan: StepPlan) -> StepHandle | MaskedStep:
        with self.on_stream():
            self._sampler.admit(plan.admits)
            self._prompt_scorer.admit(plan.admits)
            if self._drafts:
                self._drafts.admit(plan.admits, self._sampler.custom_seats(plan.admits))
                self._seats.look()
            layout = self._builder.layout(plan)
            if plan.num_drafts and self._drafts:
                sample = self._decode_drafted(plan, self._drafts)
            elif plan.num_decodes == plan.num_rows:
                sample = self._decode(plan, layout)
            elif (
                (graphs := self.mixed_graphs)
                and graphs.captured
                and not (self._groups.prompt_wave and self._builder.is_far(plan))
                and (size := graphs.size_for(plan, layout is not None))
            ):
                sample = self._padded_step(plan, layout, size, graphs)
            else:
                sample = self._mixed(plan, layout)
            self._seats.advance(plan.seats, plan.num_tokens)
            if plan.awaits_masks and not isinstance(self._sampler, Follower):
                return MaskedStep(plan.step, partial(self._sample_later, sample))
            return sample(None)

    def _sample_later(self, sample: Sample, masks: TokenMasks) -> StepHandle:
        with self.on_stream():
            return sample(masks)

    # -- decode steps -------------------------------------------------------------------------------------------

    def _decode(self, plan: StepPlan, layout: PrefixLayout | None) -> Sample:
        graphs = self.graphs
        rows = plan.num_rows
        size = graphs.size_for(rows, layout is not None) if graphs and graphs.captured else None
        batch = self._builder.decode(
            plan, size.rows if size else self._builder.decode_size(rows), layout, self._staging
        )
        if size and graphs:
            graphs.forward(size)
            return partial(self._sample_decoded, plan, size, graphs)
        gather_decode(self._seats.state, batch.buffers, batch.seats)
        self._write_logits(self._forward(batch))
        return partial(self._sample_eagerly, plan, self._builder.decode_views(rows), None)

    def _sample_decoded(
        self, plan: StepPlan, size: DecodeSize, graphs: DecodeGraphs, masks: TokenMasks | None
    ) -> StepHandle:
        features = self._sampler.features(plan.seats)
        if not features.draw_only:
            return self._sample_eagerly(plan, self._builder.decode_views(plan.num_rows), None, masks)
        if (found := self._sampler.masks(masks, None)) is not None:
            found.apply(self._logits[: plan.num_rows])
        self._readback.before_commit()
        graphs.tail(size, filtered=features.filter)
        return self._read_back(plan, self._tokens, None, None)

    def _forward_decode(self, size: DecodeSize, layers: int | None) -> None:
        batch = self._builder.decode_views(size.rows, shares_prefix=size.shares_prefix)
        gather_decode(self._seats.state, batch.buffers, batch.seats)
        self._write_logits(self._forward(batch, layers))

    def _tail_decode(self, size: DecodeSize, filtered: bool) -> None:
        batch = self._builder.decode_views(size.rows)
        sampled = self._sampled[: size.rows]
        self._sampler.sample_plain(
            self._logits[: size.rows], batch.seats, batch.buffers.seq_lens, sampled, filtered=filtered
        )
        sampled, tokens = self._agreed(sampled), self._tokens[: size.rows]
        commit(self._seats.state, tokens, batch.seats, batch.buffers.seq_lens, sampled, None)
        if self._drafts:
            self._drafts.follow(batch.seats, tokens, size.rows)

    # -- decode steps with drafts -------------------------------------------------------------------------------

    def _decode_drafted(self, plan: StepPlan, drafts: SeatDrafts) -> Sample:
        graphs = self.drafted_graphs
        size = graphs.size_for(plan.num_rows) if graphs and graphs.captured else None
        rows = size.rows if size else min(self._builder.decode_size(plan.num_rows), drafts.max_rows)
        batch = self._builder.decode(plan, rows, None, self._staging, drafts)
        if size and graphs:
            graphs.forward(size)
        else:
            drafts.gather(batch.buffers, batch.seats)
            self._write_logits(self._forward(batch))
        return partial(self._sample_drafted, plan, drafts, size, graphs)

    def _sample_drafted(
        self,
        plan: StepPlan,
        drafts: SeatDrafts,
        size: DraftedSize | None,
        graphs: DraftedGraphs | None,
        masks: TokenMasks | None,
    ) -> StepHandle:
        rows, width = plan.num_rows, drafts.width
        logits, logprobs = self._logits[: rows * width], None
        features = self._sampler.features(plan.seats)
        # Who is bound by a mask has no drafts, so it is the first query's.
        found = self._sampler.masks(masks, None if masks is None else np.arange(rows * width) // width)
        if size and graphs and features.draw_only:
            if found is not None:
                found.apply(logits)
            self._readback.before_commit()
            graphs.tail(size, filtered=features.filter)
            return self._read_back(plan, self._tokens, None, None)
        more = drafts.buffers(rows)
        output = self._sampler.sample(
            logits, more.seats, more.lengths, self._history, features, np.repeat(plan.seats, width), found, width
        )
        self._readback.before_commit()
        batch = self._builder.drafted_views(rows, drafts)
        drafts.commit(batch.buffers, batch.seats, output.token_ids[:, 0].contiguous())
        if (logprobs := output.logprobs) is not None:
            logprobs = logprobs.with_rows(logprobs.rows // width)
        return self._read_back(plan, self._tokens, logprobs, None)

    def _forward_drafted(self, size: DraftedSize, layers: int | None) -> None:
        assert self._drafts is not None
        batch = self._builder.drafted_views(size.rows, self._drafts)
        self._drafts.gather(batch.buffers, batch.seats)
        self._write_logits(self._forward(batch, layers))

    def _tail_drafted(self, size: DraftedSize, filtered: bool) -> None:
        assert self._drafts is not None
        batch, more = self._builder.drafted_views(size.rows, self._drafts), self._drafts.buffers(size.rows)
        sampled = self._sampled[: batch.num_tokens]
        logits = self._logits[: batch.num_tokens]
        self._sampler.sample_plain(logits, more.seats, more.lengths, sampled, filtered=filtered)
        self._drafts.commit(batch.buffers, batch.seats, sampled)

    # -- steps with prompt chunks -------------------------------------------------------------------------------

    def _mixed(self, plan: StepPlan, layout: PrefixLayout | None) -> Sample:
        batch = self._builder.mixed(plan, layout, self._staging)
        hidden = self._forward(batch, given=given_embeddings(plan, self.model))
        prompt_logprobs = None
        for attachment in plan.attachments:
            if isinstance(attachment, PromptLogprobs):
                prompt_logprobs = self._prompt_scorer.score(plan, attachment, hidden, batch.buffers.input_ids)
        if batch.logit_tokens is not None and len(batch.sample_rows_np):
            self._write_logits(hidden.index_select(0, batch.logit_tokens))
        return partial(self._sample_eagerly, plan, batch, prompt_logprobs)

    def prepare(self, plan: StepPlan) -> None:
        """Once through the products of a step like `plan`, whose rows all sit on the padding seat. Waits."""
        with self.on_stream():
            batch = self._builder.mixed(plan, None, self._staging)
            assert batch.logit_tokens is not None
            self._write_logits(self._forward(batch, layers=1).index_select(0, batch.logit_tokens))
            if self._stream:
                self._stream.synchronize()

    def _padded_step(self, plan: StepPlan, layout: PrefixLayout | None, size: MixedSize, graphs: MixedGraphs) -> Sample:
        batch, first = self._padded.fill(plan, layout, size, self._staging)
        graphs.forward(size)
        return partial(self._sample_padded, plan, batch, first, size, graphs)

    def _sample_padded(
        self, plan: StepPlan, batch: Batch, first: int, size: MixedSize, graphs: MixedGraphs, masks: TokenMasks | None
    ) -> StepHandle:
        seats = plan.seats[batch.sample_rows_np]
        features = self._sampler.features(seats)
        logits, logprobs = self._logits[: len(seats)], None
        found = self._sampler.masks(masks, batch.sample_rows_np)
        if features.draw_only:
            if found is not None:
                found.apply(logits)
            self._readback.before_commit()
            graphs.tail(size, filtered=features.filter)
        else:
            logprobs = self._sample(batch, seats, logits, features, found)
        if logprobs is not None:
            logprobs = logprobs.with_rows(logprobs.rows - first)
        return self._read_back(plan, self._tokens, logprobs, None, first)

    def _forward_padded(self, size: MixedSize, layers: int | None) -> None:
        batch = self._padded.view(size)
        assert batch.logit_tokens is not None
        self._padded.gather(size)
        hidden = self._forward(batch, layers)
        self._write_logits(hidden.index_select(0, batch.logit_tokens))

    def _tail_padded(self, size: MixedSize, filtered: bool) -> None:
        batch = self._padded.view(size)
        assert batch.sample_rows is not None
        seats = batch.seats.index_select(0, batch.sample_rows)
        lengths = batch.buffers.seq_lens.index_select(0, batch.sample_rows)
        sampled = self._sampled[: size.rows]
        self._sampler.sample_plain(self._logits[: size.rows], seats, lengths, sampled, filtered=filtered)
        sampled = self._agreed(sampled)
        tokens = self._tokens[: size.rows]
        commit(self._seats.state, tokens, batch.seats, batch.buffers.seq_lens, sampled, batch.sample_index)
        if self._drafts:
            self._drafts.follow(batch.seats, tokens, size.decodes)

    # -- shared -------------------------------------------------------------------------------------------------

    def _forward(self, batch: Batch, layers: int | None = None, given: GivenEmbeddings | None = None) -> torch.Tensor:
        context = StepContext(
            positions=batch.buffers.positions,
            caches=self._store.layers,
            groups=self._groups.contexts(batch),
        )
        return self.model.forward(batch.buffers.input_ids, context, layers, given)

    def _write_logits(self, hidden: torch.Tensor) -> None:
        self.model.logits(hidden, out=self._logits[: len(hidden)])

    def _sample_eagerly(
        self, plan: StepPlan, batch: Batch, prompt_logprobs: LogprobTensors | None, masks: TokenMasks | None
    ) -> StepHandle:
        """From the logits of the rows that are due, if there are any."""
        rows = batch.sample_rows_np
        logprobs = None
        if len(rows):
            seats = plan.seats[rows]
            found = self._sampler.masks(masks, rows)
            logprobs = self._sample(batch, seats, self._logits[: len(rows)], self._sampler.features(seats), found)
        else:
            self._commit(batch, self._sampled[:0])
        return self._read_back(plan, self._tokens, logprobs, prompt_logprobs)

    def _sample(
        self, batch: Batch, seats_np: np.ndarray, logits: torch.Tensor, features: Features, masks: Masks | None
    ) -> LogprobTensors | None:
        """Sample the rows that are due and commit; log-probabilities name plan rows."""
        rows = batch.sample_rows
        seats = batch.seats if rows is None else batch.seats.index_select(0, rows)
        lengths = batch.buffers.seq_lens if rows is None else batch.buffers.seq_lens.index_select(0, rows)
        logprobs = None
        if features.plain:
            if masks is not None:
                masks.apply(logits)
            sampled = self._sampled[: len(seats_np)]
            self._sampler.sample_plain(logits, seats, lengths, sampled)
        else:
            output = self._sampler.sample(logits, seats, lengths, self._history, features, seats_np, masks)
            sampled, logprobs = output.token_ids[:, 0].contiguous(), output.logprobs
        self._commit(batch, sampled)
        if logprobs is None or rows is None:
            return logprobs
        return logprobs.with_rows(rows.index_select(0, logprobs.rows.to(rows.device)))

    def _commit(self, batch: Batch, sampled: torch.Tensor) -> None:
        self._readback.before_commit()
        tokens = self._tokens[: batch.num_rows]
        sampled = self._agreed(sampled)
        commit(self._seats.state, tokens, batch.seats, batch.buffers.seq_lens, sampled, batch.sample_index)
        if self._drafts:
            self._drafts.follow(batch.seats, tokens, batch.attention.num_decodes)

    def _agreed(self, sampled: torch.Tensor) -> torch.Tensor:
        """The same tokens on every rank: the first one's. Ranks may pad differently, so as many as there can be."""
        if self._group is None or not len(sampled):
            return sampled
        ours = self._sampled[: len(sampled)]
        if ours.data_ptr() != sampled.data_ptr():
            ours.copy_(sampled)
        from_first(self._sampled, self._group)
        return ours

    def _read_back(
        self,
        plan: StepPlan,
        tokens: torch.Tensor,
        logprobs: LogprobTensors | None,
        prompt_logprobs: LogprobTensors | None,
        first: int = 0,
    ) -> StepHandle:
        """first: the plan's row 0 among those of the step."""
        failures = self._sampler.take_failures(plan.seats)
        tokens = (self._drafts.outcome if self._drafts else tokens)[first:]
        return self._readback.start(plan, tokens, logprobs, prompt_logprobs, failures)
