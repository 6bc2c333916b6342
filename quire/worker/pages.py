"""Pages: how the groups of a model's layers share one pool of equally large pages.

A page is a slice of every slab, and a slab is one piece of memory. A layer's keys are one plane, its values another;
latent rows are but one.
The planes of a group are spread over the slabs, as many to each; so with one group each plane has a slab of its own. A
slice holds one block of each of a group's planes there, or several where a group has fewer planes: kernels know blocks
of one size, and how many tokens a page holds follows from the bytes.

A state of a layer lies in one page, and those of all layers in a few; a page then is as large as makes them fit well,
and has one slab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from quire.attention.recurrent import ALIGNMENT
from quire.types.kv import MAX_TOKENS, KVGroupSpec

# Of what a group brings: slabs may have room for a plane more, in each page that it takes.
MAX_WASTE = 1 / 6
MAX_HISTORY = 16384  # ids in a page of them, where pages are large: slots are int32


@dataclass(frozen=True, slots=True)
class Pages:
    groups: list[KVGroupSpec]  # with pages for blocks; the layers' groups come first
    splits: list[int]  # kernels' blocks in a page, by group
    slabs: int
    slab_bytes: int  # of a page
    keeper: int  # the group that keeps every token, and so the history of ids
    states_a_page: int = 0  # layers' states; 0: there are none

    @property
    def page_bytes(self) -> int:
        return self.slabs * self.slab_bytes

    @property
    def whole_prompts(self) -> bool:
        """Whether nothing is kept between steps, so that one must hold the longest prompt."""
        return any(group.kind == "none" for group in self.groups)

    def kernel_block(self, group: int) -> int:
        """Tokens of a block as kernels know it."""
        return self.groups[group].block_size // self.splits[group]

    def planes_a_slab(self, group: int) -> int:
        spec = self.groups[group]
        return -(-spec.num_layers * spec.planes // self.slabs)


def lay_out(groups: Sequence[KVGroupSpec], block_size: int) -> Pages:
    """groups: of the layers. block_size: tokens of a block as kernels know it.

    If no group keeps every token, one that keeps their ids is added.
    """
    if any(group.kind == "none" for group in groups):
        return Pages([*groups], [1] * len(groups), 0, 0, 0)
    if any(group.kind == "state" for group in groups):
        return _with_states(groups, block_size)
    slabs, widths = _slabs(groups)
    slice_width = math.lcm(*widths)
    splits = [slice_width // width for width in widths]
    made = [
        msgspec.structs.replace(group, block_size=split * block_size)
        for group, split in zip(groups, splits, strict=True)
    ]
    return _with_keeper(Pages(made, splits, slabs, slice_width * block_size, 0))


def _with_keeper(pages: Pages) -> Pages:
    full = [number for number, group in enumerate(pages.groups) if group.keeps_all]
    if full:
        return replace(pages, keeper=full[0])
    ids = pages.slab_bytes // 4 if not pages.states_a_page else min(pages.slab_bytes // 4, MAX_HISTORY)
    history = KVGroupSpec("history", ids, 1, 1, 1, 4, planes=1)  # it lies in the first slab alone
    return replace(pages, groups=[*pages.groups, history], splits=[*pages.splits, 1], keeper=len(pages.groups))


def _with_states(groups: Sequence[KVGroupSpec], block_size: int) -> Pages:
    """One slab, of the smallest pages in which layers' states leave little unused."""
    (state,) = (group for group in groups if group.kind == "state")
    least = [group.bytes_per_token * block_size for group in groups if group.kind != "state"]
    unit, wanted = math.lcm(ALIGNMENT, *least), state.num_layers * state.state_bytes
    best = None
    for page in range(-(-state.state_bytes // unit) * unit, -(-wanted // unit) * unit + 1, unit):
        each = min(page // state.state_bytes, state.num_layers)
        pages = -(-state.num_layers // each)
        waste = pages * page / wanted - 1
        if best is None or waste < best[0]:
            best = waste, page, each, pages
        if waste <= MAX_WASTE:
            break
    assert best is not None
    _, page, each, pages = best
    made, splits = [], []
    for group in groups:
        is_state = group.kind == "state"
        splits.append(1 if is_state else page // (group.bytes_per_token * block_size))
        size = MAX_TOKENS if is_state else splits[-1] * block_size
        made.append(msgspec.structs.replace(group, block_size=size, pages=pages if is_state else 0))
    return _with_keeper(Pages(made, splits, 1, page, 0, each))


def _slabs(groups: Sequence[KVGroupSpec]) -> tuple[int, list[int]]:
    """How many slabs make the smallest pages without much waste, and the bytes a token of each group takes of one."""
    best = None
    planes = [group.num_layers * group.planes for group in groups]
    for slabs in range(max(planes), 0, -1):
        counts = [-(-count // slabs) for count in planes]  # planes a slab
        if any(slabs * count > (1 + MAX_WASTE) * own for count, own in zip(counts, planes, strict=True)):
            continue
        widths = [
            count * group.bytes_per_token // own for count, own, group in zip(counts, planes, groups, strict=True)
        ]
        page = slabs * math.lcm(*widths)
        if best is None or page < best[0]:
            best = page, slabs, widths
    assert best is not None, "one slab wastes nothing"
    return best[1], best[2]
