"""One plan in, one result out, and never a wait for the device in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from quire.attention.base import AttentionBackend
from quire.attention.context import StepContext
from quire.kernels.step import commit, gather_decode
from quire.models.base import DecoderStack
from quire.types.plan import PromptLogprobs, StepPlan
from quire.worker.batch import Batch, BatchBuilder
from quire.worker.graphs import DecodeGraphs, prefix_graph_sizes
from quire.worker.kv_store import KVStore
from quire.worker.prefixes import PrefixLayout
from quire.worker.prompt_logprobs import PromptScorer
from quire.worker.readback import Readback, StepHandle
from quire.worker.sampling.logprobs import LogprobTensors
from quire.worker.sampling.sampler import Features, History, Sampler
from quire.worker.seats import Seats
from quire.worker.staging import Staging


class Runner:
    """Runs plans in order on one stream.

    A decode step is: changed seats (if any) → forward graph → tail graph → readback; when rows share prefixes, the
    forward graph is one that reads these once. Any other step runs the same code from Python. Rows that want more than
    temperature sampling leave the tail graph out and sample eagerly.
    """

    def __init__(
        self,
        model: DecoderStack,
        backend: AttentionBackend,
        store: KVStore,
        seats: Seats,
        builder: BatchBuilder,
        sampler: Sampler,
        *,
        max_rows: int,
        staging_capacity: int,
        device: torch.device,
        graph_sizes: list[int],
    ) -> None:
        self.model = model
        self._backend = backend
        self._store = store
        self._seats = seats
        self._builder = builder
        self._sampler = sampler
        self._history = History(store.token_of_slot, seats.state.block_table, seats.state.block_size)
        self._prompt_scorer = PromptScorer(model, sampler.vocab_size)
        self._staging = Staging(staging_capacity, device)
        self._readback = Readback(max_rows, device)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sampled = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.graphs = self.prefix_graphs = None
        if self._stream:  # weights and buffers are being written on the stream that is current here
            self._stream.wait_stream(torch.cuda.current_stream(device))
        if self._stream and graph_sizes:
            self._logits = torch.empty(graph_sizes[-1], sampler.vocab_size, dtype=torch.float32, device=device)
            self.graphs = DecodeGraphs(graph_sizes, self._forward_decode, self._tail_decode, self._stream)
            if backend.prefix_support:
                sizes = prefix_graph_sizes(graph_sizes)
                forward = partial(self._forward_decode, shares_prefix=True)
                self.prefix_graphs = DecodeGraphs(sizes, forward, self._tail_decode, self._stream)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Everything that touches device state runs here: one stream is the order of all readers and writers."""
        with torch.inference_mode():
            if self._stream is None:
                yield
            else:
                with torch.cuda.stream(self._stream):
                    yield

    def capture(self) -> float:
        """Capture the decode graphs; seconds it took."""
        with self.on_stream():
            return sum(graphs.capture() for graphs in (self.graphs, self.prefix_graphs) if graphs)

    def run(self, plan: StepPlan) -> StepHandle:
        with self.on_stream():
            self._sampler.admit(plan.admits)
            self._prompt_scorer.admit(plan.admits)
            layout = self._builder.layout(plan)
            handle = self._decode(plan, layout) if plan.num_decodes == plan.num_rows else self._mixed(plan, layout)
            self._seats.advance(plan.seats, plan.num_tokens)
            return handle

    # -- decode steps -------------------------------------------------------------------------------------------

    def _decode(self, plan: StepPlan, layout: PrefixLayout | None) -> StepHandle:
        graphs = self.prefix_graphs if layout else self.graphs
        size = graphs.size_for(plan.num_rows) if graphs else 0
        batch = self._builder.decode(plan, size or plan.num_rows, layout, self._staging)
        features = self._sampler.features(plan.seats)
        if size and graphs:
            graphs.forward(size)
            if features.plain:
                self._readback.before_commit()
                graphs.tail(size)
                return self._readback.start(plan, self._tokens, None, None)
            logits = self._logits[: plan.num_rows]
            batch = self._builder.decode_views(plan.num_rows)
        else:
            gather_decode(self._seats.state, batch.buffers, batch.seats)
            logits = self.model.logits(self._forward(batch))
        logprobs = self._sample(batch, plan.seats, logits, features)
        return self._readback.start(plan, self._tokens, logprobs, None)

    def _forward_decode(self, size: int, *, shares_prefix: bool = False) -> None:
        batch = self._builder.decode_views(size, shares_prefix=shares_prefix)
        gather_decode(self._seats.state, batch.buffers, batch.seats)
        self.model.logits(self._forward(batch), out=self._logits[:size])

    def _tail_decode(self, size: int) -> None:
        batch = self._builder.decode_views(size)
        sampled = self._sampled[:size]
        self._sampler.sample_plain(self._logits[:size], batch.seats, batch.buffers.seq_lens, sampled)
        commit(self._seats.state, self._tokens[:size], batch.seats, batch.buffers.seq_lens, sampled, None)

    # -- steps with prompt chunks -------------------------------------------------------------------------------

    def _mixed(self, plan: StepPlan, layout: PrefixLayout | None) -> StepHandle:
        batch = self._builder.mixed(plan, layout, self._staging)
        hidden = self._forward(batch)
        logprobs = prompt_logprobs = None
        for attachment in plan.attachments:
            if isinstance(attachment, PromptLogprobs):
                prompt_logprobs = self._prompt_scorer.score(plan, attachment, hidden, batch.buffers.input_ids)
        if batch.logit_tokens is not None and len(batch.sample_rows_np):
            logits = self.model.logits(hidden.index_select(0, batch.logit_tokens))
            seats = plan.seats[batch.sample_rows_np]
            logprobs = self._sample(batch, seats, logits, self._sampler.features(seats))
        else:
            self._commit(batch, self._sampled[:0])
        return self._readback.start(plan, self._tokens, logprobs, prompt_logprobs)

    # -- shared -------------------------------------------------------------------------------------------------

    def _forward(self, batch: Batch) -> torch.Tensor:
        context = StepContext(
            positions=batch.buffers.positions,
            slots=batch.buffers.slots,
            caches=self._store.layers,
            backend=self._backend,
            plan=self._backend.plan(batch.attention),
        )
        return self.model.forward(batch.buffers.input_ids, context)

    def _sample(
        self, batch: Batch, seats_np: np.ndarray, logits: torch.Tensor, features: Features
    ) -> LogprobTensors | None:
        """Sample the rows that are due and commit; log-probabilities name plan rows."""
        rows = batch.sample_rows
        seats = batch.seats if rows is None else batch.seats.index_select(0, rows)
        lengths = batch.buffers.seq_lens if rows is None else batch.buffers.seq_lens.index_select(0, rows)
        logprobs = None
        if features.plain:
            sampled = self._sampled[: len(seats_np)]
            self._sampler.sample_plain(logits, seats, lengths, sampled)
        else:
            output = self._sampler.sample(logits, seats, lengths, self._history, features, seats_np)
            sampled, logprobs = output.token_ids[:, 0].contiguous(), output.logprobs
        self._commit(batch, sampled)
        if logprobs is None or rows is None:
            return logprobs
        return logprobs.with_rows(rows.index_select(0, logprobs.rows.to(rows.device)))

    def _commit(self, batch: Batch, sampled: torch.Tensor) -> None:
        self._readback.before_commit()
        tokens = self._tokens[: batch.num_rows]
        commit(self._seats.state, tokens, batch.seats, batch.buffers.seq_lens, sampled, batch.sample_index)
