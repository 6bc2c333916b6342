"""Steps with prompt chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from quire.types.plan import StepPlan, TokenMasks
from quire.worker.batch import Batch
from quire.worker.features.base import FeatureSetup, StepFeature, StepFeatures
from quire.worker.mixed_graphs import MixedGraphs, MixedSize
from quire.worker.padded import PaddedSteps
from quire.worker.prefixes import PrefixLayout
from quire.worker.readback import StepHandle
from quire.worker.steps.parts import Sample, StepParts


class MixedSteps:
    """A small plain step is padded to the size of a graph. Any other runs from Python: one with features, or of chunks
    that are far into their prompts and have a faster kernel there.

    padded: None: all from Python.
    """

    def __init__(self, parts: StepParts, padded: PaddedSteps | None) -> None:
        self._parts = parts
        self._features = StepFeatures(FeatureSetup(parts.model, parts.sampler.vocab_size, parts.narrowed))
        self._padded = padded
        self.graphs = MixedGraphs(padded.sizes) if padded else None

    def run(self, plan: StepPlan, layout: PrefixLayout | None) -> Sample:
        features = self._features.of(plan) if plan.attachments else []
        size = self.size_for(plan, layout, features)
        if size is None:
            return self._run_eagerly(plan, layout, features)
        return self._run_padded(plan, layout, size)

    def size_for(self, plan: StepPlan, layout: PrefixLayout | None, features: Sequence[Any]) -> MixedSize | None:
        """Of the graph that runs the step; None: none does."""
        parts, graphs = self._parts, self.graphs
        if features or graphs is None or not graphs.captured or parts.forbids_graphs:
            return None
        if parts.groups.prompt_wave and parts.builder.is_far(plan):
            return None
        whole = parts.builder.is_whole(plan)
        return graphs.size_for(plan, layout is not None, adapted=parts.has_adapters, whole=whole)

    # -- from Python --------------------------------------------------------------------------------------------

    def _run_eagerly(
        self, plan: StepPlan, layout: PrefixLayout | None, features: Sequence[tuple[str, StepFeature, Any]]
    ) -> Sample:
        parts = self._parts
        batch = parts.builder.mixed(plan, layout, parts.staging)
        given = None
        parts.receive(batch)
        for _, feature, wanted in features:
            if (found := feature.before_forward(plan, wanted)) is not None:
                assert given is None, "two features give embeddings"
                given = found
        hidden = parts.forward(batch, given=given, own=parts.own_part(plan, batch))
        parts.send(batch)
        answers = {
            tag: answer
            for tag, feature, wanted in features
            if parts.is_last
            and (answer := feature.after_forward(plan, wanted, hidden, batch.buffers.input_ids)) is not None
        }
        if batch.logit_tokens is not None and len(batch.sample_rows_np):
            parts.write_logits(hidden, batch.logit_tokens)
        return partial(parts.sample_eagerly, plan, batch, answers)

    def prepare(self, plan: StepPlan) -> None:
        """Once through the products of a step like `plan`, whose rows all sit on the padding seat."""
        parts = self._parts
        batch = parts.builder.mixed(plan, None, parts.staging)
        assert batch.logit_tokens is not None
        hidden = parts.forward(batch, layers=1, own=parts.own_part(plan, batch))
        parts.write_logits(hidden, batch.logit_tokens)

    # -- padded -------------------------------------------------------------------------------------------------

    def _run_padded(self, plan: StepPlan, layout: PrefixLayout | None, size: MixedSize) -> Sample:
        assert self._padded is not None
        assert self.graphs is not None
        self.graphs.capture([size], self.forward, self.tail)
        batch, first = self._padded.fill(plan, layout, size, self._parts.staging)
        self.graphs.forward(size)
        return partial(self._sample_padded, plan, batch, first, size, self.graphs)

    def _sample_padded(
        self, plan: StepPlan, batch: Batch, first: int, size: MixedSize, graphs: MixedGraphs, masks: TokenMasks | None
    ) -> StepHandle:
        parts = self._parts
        seats = plan.seats[batch.sample_rows_np]
        gathered = parts.gather_unless_plain(plan, seats)
        features = parts.sampler.features(seats)
        logits, logprobs = parts.logits[: len(seats)], None
        found = parts.sampler.masks(masks, batch.sample_rows_np)
        if features.draw_only:
            if found is not None:
                found.apply(logits)
            parts.readback.before_commit()
            graphs.tail(size, filtered=features.filter or gathered)
        else:
            logprobs = parts.sample(batch, seats, logits, features, found)
        if logprobs is not None:
            logprobs = logprobs.with_rows(logprobs.rows - first)
        return parts.read_back(plan, logprobs, first=first)

    def forward(self, size: MixedSize, layers: int | None) -> None:
        """What a forward graph holds."""
        assert self._padded is not None
        batch = self._padded.view(size)
        assert batch.logit_tokens is not None
        self._padded.gather(size)
        with self._parts.for_graphs(size.adapted):
            hidden = self._parts.forward(batch, layers)
            self._parts.write_logits(hidden, batch.logit_tokens, before_tail=True)

    def tail(self, size: MixedSize, filtered: bool) -> None:
        """What a tail graph holds."""
        assert self._padded is not None
        parts, batch = self._parts, self._padded.view(size)
        assert batch.sample_rows is not None
        seats = batch.seats.index_select(0, batch.sample_rows)
        lengths = batch.buffers.seq_lens.index_select(0, batch.sample_rows)
        sampled = parts.sample_in_tail(seats, lengths, size.rows, filtered=filtered)
        parts.write_tokens(batch, sampled)
