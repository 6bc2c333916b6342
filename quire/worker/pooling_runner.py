"""The runner of a model that makes vectors: no logits, no sampling, no graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from quire.attention.base import PromptAttention
from quire.attention.context import EncoderContext, StepContext
from quire.kernels.step.step import commit
from quire.models.pooling import PoolingModel
from quire.platforms.transfers import upload
from quire.types.plan import Pool, StepPlan
from quire.types.result import PooledRows, StepResult
from quire.worker.adapters import Adapters
from quire.worker.batch import Batch, BatchBuilder
from quire.worker.kv_store import KVStore
from quire.worker.layer_groups import LayerGroups
from quire.worker.pooler import PooledTensors, Pooler
from quire.worker.readback import PendingStep, ReadyStep, StepHandle
from quire.worker.seats import DeviceSeats
from quire.worker.staging import Staging

MakeContext = Callable[[StepPlan, Pool, Batch], StepContext | EncoderContext]


def decoder_contexts(groups: LayerGroups, store: KVStore) -> MakeContext:
    def make(_plan: StepPlan, _wanted: Pool, batch: Batch) -> StepContext:
        return StepContext(batch.buffers.positions, store.layers, groups.contexts(batch))

    return make


def encoder_contexts(backend: PromptAttention) -> MakeContext:
    def make(plan: StepPlan, wanted: Pool, batch: Batch) -> EncoderContext:
        return EncoderContext(
            positions=batch.buffers.positions,
            token_types=_token_types(plan, wanted, batch.seats.device),
            backend=backend,
            plan=backend.plan(plan.num_tokens, batch.attention.query_start),
        )

    return make


def _token_types(plan: StepPlan, wanted: Pool, device: torch.device) -> torch.Tensor | None:
    """int32 [tokens]: 1 from each row's second text on; None if there is no pair among the prompts."""
    if (wanted.second_texts >= plan.num_tokens).all():
        return None
    types = [np.arange(n) >= begin for n, begin in zip(plan.num_tokens, wanted.second_texts, strict=True)]
    return upload(torch.from_numpy(np.concatenate(types).astype(np.int32)), device)


class PoolingRunner:
    """Runs plans in order on one stream, like `Runner`."""

    def __init__(
        self,
        model: PoolingModel,
        make_context: MakeContext,
        seats: DeviceSeats,
        builder: BatchBuilder,
        *,
        max_rows: int,
        staging_capacity: int,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        adapters: Adapters | None = None,
    ) -> None:
        self.model = model
        self._adapters = adapters
        self._make_context = make_context
        self._seats = seats
        self._builder = builder
        self._pooler = Pooler(model, max_rows, device)
        self._staging = Staging(staging_capacity, device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._stream = stream
        if self._stream:  # weights and buffers are being written on the stream that is current here
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.inference_mode():
            if self._stream is None:
                yield
            else:
                with torch.cuda.stream(self._stream):
                    yield

    def run(self, plan: StepPlan) -> StepHandle:
        with self._on_stream():
            wanted = next(one for one in plan.attachments if isinstance(one, Pool))
            if self._adapters is not None:
                self._adapters.begin(plan, self._seats)
            batch = self._builder.mixed(plan, None, self._staging)
            if self._adapters is not None:
                self._adapters.find_rows(batch, self._seats)
            num_computed = self._seats.num_computed_np[plan.seats]
            hidden = self.model(batch.buffers.input_ids, self._make_context(plan, wanted, batch))
            pooled = self._pooler.pool(plan, wanted, hidden, num_computed)
            tokens = self._tokens[: batch.num_rows]
            commit(self._seats.state, tokens, batch.seats, batch.buffers.seq_lens, self._tokens[:0], batch.sample_index)
            self._seats.advance(plan.seats, plan.num_tokens)
            return self._read_back(plan, pooled)

    def _read_back(self, plan: StepPlan, pooled: PooledTensors) -> StepHandle:
        if self._stream is None or not pooled.values.is_cuda:
            return ReadyStep(_result(plan, pooled, pooled.values.cpu()))
        host = torch.empty(pooled.values.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(pooled.values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return PendingStep(copied, partial(_result, plan, pooled, host))


def _result(plan: StepPlan, pooled: PooledTensors, values: torch.Tensor) -> StepResult:
    return StepResult(
        step=plan.step,
        tokens=np.full((plan.num_rows, 1), -1, np.int32),
        counts=np.zeros(plan.num_rows, np.int32),
        pooled=PooledRows(pooled.rows, pooled.counts.astype(np.int32), values.numpy()),
    )
