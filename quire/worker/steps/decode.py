"""Steps of decode rows only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from quire.kernels.step.step import gather_decode
from quire.types.plan import StepPlan, TokenMasks
from quire.worker.graphs import DecodeGraphs, DecodeSize
from quire.worker.prefixes import PrefixLayout
from quire.worker.readback import StepHandle
from quire.worker.steps.parts import NOTHING, Sample, StepParts


class DecodeSteps:
    """Changed seats (if any) → forward graph → tail graph → readback. sizes: to capture; none: all from Python."""

    def __init__(self, parts: StepParts, sizes: Sequence[DecodeSize]) -> None:
        self._parts = parts
        self.graphs = DecodeGraphs(sizes) if sizes else None

    def run(self, plan: StepPlan, layout: PrefixLayout | None) -> Sample:
        parts, graphs = self._parts, self.graphs
        rows = plan.num_rows
        size = None
        if graphs and graphs.captured and not parts.forbids_graphs:
            size = graphs.size_for(rows, layout is not None, adapted=parts.has_adapters)
        if size and graphs:
            graphs.capture([size], self.forward, self.tail)
        batch = parts.builder.decode(
            plan, size.rows if size else parts.builder.decode_size(rows), layout, parts.staging
        )
        parts.receive(batch)
        if size and graphs:
            graphs.forward(size)
            parts.send(batch)
            return partial(self._sample, plan, size, graphs)
        gather_decode(parts.seats.state, batch.buffers, batch.seats)
        parts.write_logits(parts.forward(batch))
        parts.send(batch)
        return partial(parts.sample_eagerly, plan, parts.builder.decode_views(rows), NOTHING)

    def _sample(self, plan: StepPlan, size: DecodeSize, graphs: DecodeGraphs, masks: TokenMasks | None) -> StepHandle:
        parts = self._parts
        gathered = parts.gather_unless_plain(plan, plan.seats)
        features = parts.sampler.features(plan.seats)
        if not features.draw_only:
            return parts.sample_eagerly(plan, parts.builder.decode_views(plan.num_rows), NOTHING, masks)
        if (found := parts.sampler.masks(masks, None)) is not None:
            found.apply(parts.logits[: plan.num_rows])
        parts.readback.before_commit()
        graphs.tail(size, filtered=features.filter or gathered)
        return parts.read_back(plan, None)

    def forward(self, size: DecodeSize, layers: int | None) -> None:
        """What a forward graph holds."""
        parts = self._parts
        batch = parts.builder.decode_views(size.rows, shares_prefix=size.shares_prefix)
        gather_decode(parts.seats.state, batch.buffers, batch.seats)
        with parts.for_graphs(size.adapted):
            parts.write_logits(parts.forward(batch, layers), before_tail=True)

    def tail(self, size: DecodeSize, filtered: bool) -> None:
        """What a tail graph holds."""
        parts = self._parts
        batch = parts.builder.decode_views(size.rows)
        sampled = parts.sample_in_tail(batch.seats, batch.buffers.seq_lens, size.rows, filtered=filtered)
        parts.write_tokens(batch, sampled)
