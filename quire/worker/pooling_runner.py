"""The runner of a model that makes vectors: no logits, no sampling, no graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from quire.attention.base import AttentionSpec, LayerCache, PromptAttention
from quire.attention.context import GroupContext, StepContext
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
from quire.worker.state_pages import StatePages

MakeContext = Callable[[StepPlan, Pool, Batch], StepContext]


def decoder_contexts(groups: LayerGroups, store: KVStore) -> MakeContext:
    def make(_plan: StepPlan, _wanted: Pool, batch: Batch) -> StepContext:
        return StepContext(batch.buffers.positions, store.layers, groups.contexts(batch))

    return make


def encoder_contexts(
    backends: Sequence[PromptAttention], specs: Sequence[AttentionSpec], layer_groups: Sequence[int]
) -> MakeContext:
    """Of whole prompts. backends, specs: of each group of layers. layer_groups: the number of each layer's, empty if
    the layers need no memory for keys and values."""
    slots = torch.arange(specs[0].max_tokens if layer_groups else 0, dtype=torch.int32, device=specs[0].device)

    def make(plan: StepPlan, wanted: Pool, batch: Batch) -> StepContext:
        tokens = len(batch.buffers.positions)
        keys = wanted.num_keys if (wanted.num_keys < plan.num_tokens).any() else None
        scratch = [_scratch(spec, tokens) for spec in specs] if layer_groups else []
        return StepContext(
            positions=batch.buffers.positions,
            caches=[scratch[number] for number in layer_groups],
            groups=[
                GroupContext(slots[:tokens], one, one.plan(plan.num_tokens, batch.attention.query_start, keys))
                for one in backends
            ],
            token_types=_token_types(plan, wanted, batch.seats.device),
            whole_prompts=True,
        )

    return make


def _scratch(spec: AttentionSpec, tokens: int) -> LayerCache:
    shape = (tokens, spec.num_kv_heads, 1, spec.head_dim)
    k, v = (torch.empty(shape, dtype=spec.dtype, device=spec.device) for _ in "kv")
    return LayerCache(k, v)


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
        states: StatePages | None,
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
        self._states = states
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
            if self._states is not None:
                self._states.before(plan)
            wanted = next(one for one in plan.attachments if isinstance(one, Pool))
            if self._adapters is not None:
                self._adapters.begin(plan, self._seats)
            batch = self._builder.mixed(plan, None, self._staging)
            if self._adapters is not None:
                self._adapters.find_rows(batch, self._seats)
            num_computed = self._seats.num_computed_np[plan.seats]
            hidden = self.model(batch.buffers.input_ids, self._make_context(plan, wanted, batch))
            if self._states is not None:
                self._states.after(plan)
            pooled = self._pooler.pool(plan, wanted, hidden, num_computed)
            tokens = self._tokens[: batch.num_rows]
            commit(self._seats.state, tokens, batch.seats, batch.buffers.seq_lens, self._tokens[:0], batch.sample_index)
            self._seats.advance(plan.seats, plan.num_tokens)
            return self._read_back(plan, pooled)

    def _read_back(self, plan: StepPlan, pooled: list[PooledTensors]) -> StepHandle:
        if self._stream is None or not any(part.values.is_cuda for part in pooled):
            return ReadyStep(_result(plan, pooled, [part.values.cpu() for part in pooled]))
        hosts = [torch.empty(part.values.shape, dtype=torch.float32, pin_memory=True) for part in pooled]
        for host, part in zip(hosts, pooled, strict=True):
            host.copy_(part.values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return PendingStep(copied, partial(_result, plan, pooled, hosts))


def _result(plan: StepPlan, pooled: list[PooledTensors], values: list[torch.Tensor]) -> StepResult:
    return StepResult(
        step=plan.step,
        tokens=np.full((plan.num_rows, 1), -1, np.int32),
        counts=np.zeros(plan.num_rows, np.int32),
        pooled=[
            PooledRows(part.rows, part.counts.astype(np.int32), host.numpy())
            for part, host in zip(pooled, values, strict=True)
        ],
    )
