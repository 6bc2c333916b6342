"""One plan in, one result out, and never a wait for the device in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch

from quire.types.kv import DraftCost
from quire.types.plan import StepPlan, TokenMasks
from quire.worker.graphs import CapturedSteps, DecodeSize, DraftedSize
from quire.worker.masked_step import MaskedStep
from quire.worker.padded import PaddedSteps
from quire.worker.readback import StepHandle
from quire.worker.sampling.follower import Follower
from quire.worker.steps.decode import DecodeSteps
from quire.worker.steps.drafted import DraftedSteps
from quire.worker.steps.mixed import MixedSteps
from quire.worker.steps.parts import Sample, StepParts


class Runner:
    """Runs plans in order on one stream.

    There are three kinds of steps (`worker/steps`): decode rows, decode rows with drafts, and steps with prompt chunks.
    Each is two graphs where it can be, a forward pass and a tail, and the same code from Python where not. Rows that
    want their logits edited or log-probabilities leave the tail graph out and sample eagerly. A step that awaits masks
    stops at its logits; masks are applied to these in place, and it goes on as it would have without.

    decode_sizes, drafted_sizes, padded: of the graphs to capture, on a GPU.
    """

    def __init__(
        self,
        parts: StepParts,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        *,
        decode_sizes: Sequence[DecodeSize] = (),
        drafted_sizes: Sequence[DraftedSize] = (),
        padded: PaddedSteps | None = None,
    ) -> None:
        self.parts = parts
        self._stream = stream
        if stream is None:
            decode_sizes, drafted_sizes, padded = (), (), None
        else:  # weights and buffers are being written on the stream that is current here
            stream.wait_stream(torch.cuda.current_stream(device))
        self.decode = DecodeSteps(parts, decode_sizes)
        self.drafted = DraftedSteps(parts, parts.drafts, drafted_sizes) if parts.drafts else None
        self.mixed = MixedSteps(parts, padded)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Everything that touches device state runs here: one stream is the order of all readers and writers."""
        with torch.inference_mode():
            if self._stream is None:
                yield
            else:
                with torch.cuda.stream(self._stream):
                    yield

    # -- steps --------------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepHandle | MaskedStep:
        parts = self.parts
        with self.on_stream():
            if (states := parts.store.states) is not None:
                states.before(plan)
            parts.begin(plan)
            parts.sampler.admit(plan.admits)
            if parts.adapters is not None:
                parts.adapters.begin(plan, parts.seats)
            if parts.drafts:
                parts.drafts.admit(plan.admits, parts.sampler.custom_seats(plan.admits))
                parts.seats.look()
            layout = parts.builder.layout(plan)
            if parts.has_adapters:
                layout = None  # there are no graphs for both
            if plan.num_drafts and self.drafted:
                sample = self.drafted.run(plan)
            elif plan.num_decodes == plan.num_rows:
                sample = self.decode.run(plan, layout)
            else:
                sample = self.mixed.run(plan, layout)
            if states is not None:
                states.after(plan)
            parts.seats.advance(plan.seats, plan.num_tokens)
            if plan.awaits_masks and not isinstance(parts.sampler, Follower):
                return MaskedStep(plan.step, partial(self._sample_later, sample))
            return sample(None)

    def _sample_later(self, sample: Sample, masks: TokenMasks) -> StepHandle:
        with self.on_stream():
            return sample(masks)

    # -- the start ----------------------------------------------------------------------------------------------

    @property
    def _captured_steps(self) -> Iterator[CapturedSteps]:
        """Those that are graphs, the largest first, so that the others reuse its memory."""
        for steps in (self.mixed, self.decode, self.drafted):
            if steps is not None and steps.graphs:
                yield cast("CapturedSteps", steps)

    def capture(self, *, all_sizes: bool) -> None:
        """Capture graphs into one pool; but for all sizes only those that are wanted early, while any other is captured
        by `capture_another`, or by the first step that wants it: that one waits, for this once."""
        if self._stream is None:
            return
        pool = torch.cuda.graph_pool_handle()
        with self.on_stream():
            for steps in self._captured_steps:
                steps.graphs.prepare(steps.forward, steps.tail, pool)
            for steps in self._captured_steps:
                sizes = steps.graphs.sizes if all_sizes else steps.graphs.wanted_early()
                steps.graphs.capture(sizes, steps.forward, steps.tail)
            self._stream.synchronize()

    def capture_another(self) -> bool:
        """Capture one of the missing sizes; False: there is none."""
        with self.on_stream():
            for steps in self._captured_steps:
                if steps.graphs.captured and (missing := steps.graphs.missing):
                    steps.graphs.capture(missing[:1], steps.forward, steps.tail)
                    return True
        return False

    @property
    def driver_bytes(self) -> int:
        """That the driver keeps of the graphs when they are gone."""
        return sum(steps.graphs.driver_bytes for steps in self._captured_steps)

    def rehearse(self) -> None:
        """Launch what the graphs will hold, for whoever compiles kernels ahead of them."""
        with self.on_stream():
            for steps in self._captured_steps:
                steps.graphs.rehearse(steps.forward, steps.tail)

    def prepare(self, plan: StepPlan) -> None:
        """Once through the products of a step like `plan`, whose rows all sit on the padding seat. Waits."""
        with self.on_stream():
            self.mixed.prepare(plan)
            if self._stream:
                self._stream.synchronize()

    # -- what the worker reports --------------------------------------------------------------------------------

    @property
    def mixed_sizes(self) -> list[tuple[int, int]]:
        """See WorkerReport."""
        sizes = self.mixed.graphs.sizes if self.mixed.graphs else []
        plain = (size for size in sizes if not (size.shares_prefix or size.adapted))
        return list(dict.fromkeys((size.decodes, size.tokens) for size in plain))

    @property
    def max_drafted_rows(self) -> int:
        """See WorkerReport."""
        return self.parts.drafts.max_rows if self.parts.drafts else 0

    def draft_costs(self) -> list[DraftCost]:
        """See WorkerReport: what graphs take whose rows all sit on the padding seat. Waits.

        Padding goes to no experts: what they would take is thought to be in proportion to the bytes.
        """
        drafted, plain = self.drafted and self.drafted.graphs, self.decode.graphs
        if not drafted or not plain or not (drafted.captured and plain.captured):
            return []
        costs, width = [], self.parts.drafts.width if self.parts.drafts else 1
        with self.on_stream():
            for size in reversed(drafted.sizes):
                without = None if size.adapted else plain.size_for(size.rows, shares_prefix=False)
                if without is not None:
                    seconds = plain.seconds(without) * self._with_experts(size.rows)
                    every = drafted.seconds(size) * self._with_experts(size.rows * width)
                    costs.append(DraftCost(size.rows, seconds, every))
        return costs

    def _with_experts(self, tokens: int) -> float:
        """How much more a step of so many tokens reads than one of padding."""
        model = self.parts.model
        return 1 + model.expert_bytes(tokens) / (model.num_bytes() - model.expert_bytes())
