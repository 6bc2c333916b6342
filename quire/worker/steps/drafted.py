"""Steps of decode rows that bring drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from quire.types.plan import StepPlan, TokenMasks
from quire.worker.graphs import DraftedGraphs, DraftedSize
from quire.worker.readback import StepHandle
from quire.worker.seat_drafts import SeatDrafts
from quire.worker.steps.parts import Sample, StepParts


class DraftedSteps:
    """As plain decode steps, with several tokens a row. sizes: to capture; none: all from Python."""

    def __init__(self, parts: StepParts, drafts: SeatDrafts, sizes: Sequence[DraftedSize]) -> None:
        self._parts = parts
        self._drafts = drafts
        self.graphs = DraftedGraphs(sizes) if sizes else None

    def run(self, plan: StepPlan) -> Sample:
        parts, graphs, drafts = self._parts, self.graphs, self._drafts
        size = None
        if graphs and graphs.captured and not parts.forbids_graphs:
            size = graphs.size_for(plan.num_rows, adapted=parts.has_adapters)
        rows = size.rows if size else min(parts.builder.decode_size(plan.num_rows), drafts.max_rows)
        batch = parts.builder.decode(plan, rows, None, parts.staging, drafts)
        if size and graphs:
            graphs.forward(size)
        else:
            drafts.gather(batch.buffers, batch.seats)
            parts.write_logits(parts.forward(batch))
        return partial(self._sample, plan, size, graphs)

    def _sample(
        self,
        plan: StepPlan,
        size: DraftedSize | None,
        graphs: DraftedGraphs | None,
        masks: TokenMasks | None,
    ) -> StepHandle:
        parts, drafts = self._parts, self._drafts
        rows, width = plan.num_rows, drafts.width
        logits = parts.logits[: rows * width]
        features = parts.sampler.features(plan.seats)
        # Who is bound by a mask has no drafts, so it is the first query's.
        found = parts.sampler.masks(masks, None if masks is None else np.arange(rows * width) // width)
        if size and graphs and features.draw_only:
            if found is not None:
                found.apply(logits)
            parts.readback.before_commit()
            graphs.tail(size, filtered=features.filter)
            return parts.read_back(plan, None)
        more = drafts.buffers(rows)
        sampled, logprobs = parts.draw(
            logits, more.seats, more.lengths, features, np.repeat(plan.seats, width), found, width
        )
        parts.readback.before_commit()
        batch = parts.builder.drafted_views(rows, drafts)
        drafts.commit(batch.buffers, batch.seats, parts.agreed(sampled))
        if logprobs is not None:
            logprobs = logprobs.with_rows(logprobs.rows // width)
        return parts.read_back(plan, logprobs)

    def forward(self, size: DraftedSize, layers: int | None) -> None:
        """What a forward graph holds."""
        parts = self._parts
        batch = parts.builder.drafted_views(size.rows, self._drafts)
        self._drafts.gather(batch.buffers, batch.seats)
        with parts.for_graphs(size.adapted):
            parts.write_logits(parts.forward(batch, layers))

    def tail(self, size: DraftedSize, filtered: bool) -> None:
        """What a tail graph holds."""
        parts, more = self._parts, self._drafts.buffers(size.rows)
        batch = parts.builder.drafted_views(size.rows, self._drafts)
        sampled = parts.sampled[: batch.num_tokens]
        logits = parts.logits[: batch.num_tokens]
        parts.sampler.sample_plain(logits, more.seats, more.lengths, sampled, filtered=filtered)
        self._drafts.commit(batch.buffers, batch.seats, parts.agreed(sampled))
