"""LoRA adapters of a worker: those kept on the host, those in the device's slots, and whose each row of a step is.

Who sits in which slot the brain decides; a plan says what changes. A step whose rows have no adapters is the same as
in a worker that knows of none, its graphs too. Others have graphs of their own, which find each row's slot by its seat.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import torch

from quire.config.lora import LoraConfig
from quire.kernels.low_rank.rows import adapter_rows
from quire.layers.low_rank import ActiveRows
from quire.models.adapters.model import AdaptedModel, HostAdapter, ReadAdapter
from quire.models.base import Model
from quire.types.plan import StepPlan
from quire.worker.batch import Batch
from quire.worker.seats import DeviceSeats


class Adapters:
    """lora: of an engine that takes adapters; dtype: of the model."""

    def __init__(self, lora: LoraConfig, model: Model, dtype: torch.dtype, device: torch.device) -> None:
        kept = dtype if lora.lora_dtype == "auto" else getattr(torch, lora.lora_dtype)
        self._max_rank = lora.max_lora_rank
        self._model = AdaptedModel(model, lora.max_loras, lora.max_lora_rank, kept, device, lora.lora_target_modules)
        self._hosted: dict[str, HostAdapter] = {}  # by key
        self._being_read: dict[str, Future[ReadAdapter]] = {}  # by key
        self._with_rare: set[int] = set()  # slots
        self.is_on = False  # whether the step has rows with adapters

    @property
    def active(self) -> ActiveRows:
        """What the model's layers look at."""
        return self._model.active

    def num_bytes(self) -> int:
        """That the slots take on the device."""
        return self._model.num_bytes()

    # -- on the host --------------------------------------------------------------------------------------------

    def begin_read(self, key: str, path: str) -> None:
        """Read an adapter's files on a thread of its own, while steps go on; `load` gets what it finds."""
        if key in self._hosted or key in self._being_read:
            return
        found: Future[ReadAdapter] = Future()

        def read() -> None:
            try:
                found.set_result(self._model.begin(Path(path), self._max_rank))
            except BaseException as error:
                found.set_exception(error)

        self._being_read[key] = found
        Thread(target=read, name="adapter", daemon=True).start()

    def is_read(self, key: str) -> bool:
        """Whether `load` need not wait for its files."""
        found = self._being_read.get(key)
        return found is None or found.done()

    def load(self, key: str, path: str) -> None:
        """Keep an adapter on the host. Raises ConfigError (and kin) if it does not fit the model.

        Ranks must be asked alike.
        """
        self.begin_read(key, path)
        if key not in self._hosted:
            self._hosted[key] = self._model.finish(self._being_read.pop(key).result())

    def drop(self, key: str) -> None:
        """Unknown keys are ignored. Slots keep what they have."""
        self._hosted.pop(key, None)

    @property
    def keys(self) -> list[str]:
        """Of those on the host."""
        return list(self._hosted)

    # -- steps --------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, seats: DeviceSeats) -> None:
        """A step comes: change what it changes of slots and seats, and see whether it needs adapters at all."""
        for change in plan.adapters:
            adapter = self._hosted.get(change.adapter.key)
            self._model.put(change.slot, adapter)
            self._with_rare.discard(change.slot)
            if adapter is not None and self._model.is_rare(adapter):
                self._with_rare.add(change.slot)
        seats.seat_adapters(plan.admits)
        self._use(set(seats.adapters_np[plan.seats].tolist()))

    def _use(self, slots: set[int]) -> None:
        self.is_on = any(slots)
        self.active.with_rare = not self._with_rare.isdisjoint(slots)

    @property
    def forbids_graphs(self) -> bool:
        """Whether the step has to run from Python."""
        return self.is_on and self.active.with_rare

    def find_rows(self, batch: Batch, seats: DeviceSeats) -> None:
        """Let the layers know whose adapter each token of the step has. On the device alone; part of graphs."""
        self.active.rows = None
        if not self.is_on:
            return
        assert seats.adapters is not None
        slots = seats.adapters.index_select(0, batch.seats)
        if batch.num_tokens != batch.num_rows or batch.attention.num_decodes != batch.num_rows:
            slots = slots.index_select(0, self._rows_of_tokens(batch))
        self.active.rows = adapter_rows(slots, self.active.num_slots)

    def _rows_of_tokens(self, batch: Batch) -> torch.Tensor:
        tokens = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.seats.device)
        attention = batch.attention
        if attention.num_decodes == batch.num_rows:
            return tokens // attention.num_queries
        rows = torch.searchsorted(attention.query_start[1:].contiguous(), tokens, right=True)
        return rows.clamp_(max=batch.num_rows - 1)  # of tokens that are nobody's

    @contextmanager
    def as_if(self, is_on: bool) -> Iterator[None]:
        """Steps that nobody asked for: with adapters, or without."""
        before, self.is_on, self.active.with_rare = self.is_on, is_on, False
        try:
            yield
        finally:
            self.is_on, self.active.rows = before, None
