"""CUDA graphs of small steps with prompt chunks: the same padded layout every time, so that launching costs nothing.

A size holds up to `decodes` decode rows and MAX_PROMPTS prompt chunks, `tokens` tokens in all. The plan's rows lie in
one piece: padding decode rows stand before them, empty rows behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quire.types.plan import StepPlan
from quire.worker.graphs import StepGraphs

MAX_PROMPTS = 16  # prompt chunks in one step
# Weights of a layer times tokens of the largest step that is captured: beyond, the device takes much longer than the
# host's launches (0.8 against 0.3 to 0.6 ms a layer on an H200), and running ahead hides them.
MAX_WORK = 2.65e11
MEASURED_LAYERS = 32  # with as many; fewer may be of several parts, and are taken for no less to launch
WHOLE_TOKENS = 512  # room for prompts from which on a size may be for whole ones


@dataclass(frozen=True, slots=True)
class MixedSize:
    """What a graph has room for."""

    decodes: int
    tokens: int  # those of decode rows included
    shares_prefix: bool = False  # some decode rows begin with the same blocks, which are read once
    adapted: bool = False  # some rows have LoRA adapters
    whole: bool = False  # no token of its prompts was there before the step

    @property
    def rows(self) -> int:
        return self.decodes + MAX_PROMPTS


def mixed_sizes(max_rows: int, max_tokens: int, num_weights: int, num_layers: int) -> list[MixedSize]:
    """Sizes to capture, falling. Decode rows and prompts together make round numbers of rows.

    max_rows, max_tokens: of any step; num_weights: elements of the model, this rank's; num_layers: that keep something.
    """
    decodes = [count for count in (0, 16, 48, 112, 240, 496) if 4 * count < 3 * max_rows]
    if max_rows <= 512:
        decodes.append(max_rows)
    # One size has room for a full step and its padding.
    top = min(2 * max_tokens, int(MAX_WORK * max(num_layers, MEASURED_LAYERS) / num_weights))
    sizes = [
        MixedSize(count, tokens)
        for count in decodes
        for tokens in (128, 256, 384, 512, 768, 1024, 1536, 2048)
        if 2 * count <= tokens <= top
    ]
    return sorted(sizes, key=lambda size: (size.tokens, size.decodes), reverse=True)


def with_twins(sizes: list[MixedSize], *, prefixes: bool, adapters: bool, whole: bool = False) -> list[MixedSize]:
    """`sizes`, falling, with those for rows that share prefixes, for whole prompts, and for rows with adapters among
    them."""
    sizes = with_prefixes(sizes) if prefixes else sizes
    sizes = with_whole(sizes) if whole else sizes
    return with_adapters(sizes) if adapters else sizes


def with_whole(sizes: list[MixedSize]) -> list[MixedSize]:
    """`sizes`, falling, where those with much room for prompts are for whole ones; of every other number of tokens, the
    largest included, there is the size for any beside."""
    tokens = sorted({size.tokens for size in sizes}, reverse=True)[::2]
    made = []
    for size in sizes:
        roomy = size.tokens - size.decodes >= WHOLE_TOKENS
        if not roomy or size.tokens in tokens:
            made.append(size)
        if roomy:
            made.append(replace(size, whole=True))
    return made


def with_prefixes(sizes: list[MixedSize]) -> list[MixedSize]:
    """`sizes`, falling, and beside every other one of them, the largest included, its twin for rows that share
    prefixes."""
    decodes = sorted({size.decodes for size in sizes if size.decodes}, reverse=True)[::2]
    tokens = sorted({size.tokens for size in sizes}, reverse=True)[::2]
    made = []
    for size in sizes:
        made.append(size)
        if size.decodes in decodes and size.tokens in tokens:
            made.append(replace(size, shares_prefix=True))
    return made


def with_adapters(sizes: list[MixedSize]) -> list[MixedSize]:
    """`sizes`, falling, and beside every one for rows without shared prefixes its twin for rows with adapters."""
    twins = ([size] if size.shares_prefix else [size, replace(size, adapted=True)] for size in sizes)
    return [size for pair in twins for size in pair]


class MixedGraphs(StepGraphs[MixedSize]):
    """Small steps with prompt chunks. A tail samples the rows that are due."""

    def size_for(
        self, plan: StepPlan, shares_prefix: bool, *, adapted: bool = False, whole: bool = False
    ) -> MixedSize | None:
        """The smallest size that holds the step; None if none does. whole: the step's prompts are."""
        decodes, prompt_tokens = plan.num_decodes, len(plan.token_ids)
        if plan.num_rows - decodes > MAX_PROMPTS:
            return None
        for size in reversed(self.sizes):
            fits = size.decodes >= decodes and size.tokens - size.decodes >= prompt_tokens
            if fits and size.shares_prefix == shares_prefix and size.adapted == adapted and whole >= size.whole:
                return size
        return None

    def wanted_early(self) -> list[MixedSize]:
        """The largest alone: there are many, and most services meet few."""
        return self.sizes[:1]

    def _rehearsed(self) -> Iterable[MixedSize]:
        """Kernels differ by the number of tokens, by whether there are decode rows, by whether these share or have
        adapters, and by whether prompts are whole."""
        kinds = {(size.tokens, size.shares_prefix, size.adapted, size.whole): size for size in reversed(self.sizes)}
        return kinds.values()
