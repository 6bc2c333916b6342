"""Pages: how the groups of a model's layers share one pool of equally large pages.

A page is a slice of every slab, and a slab is one piece of memory. A layer's keys are one plane, its values another;
latent rows are but one.
The planes of a group are spread over the slabs, as many to each; so with one group each plane has a slab of its own. A
slice holds one block of each of a group's planes there, or several where a group has fewer planes: kernels know blocks
of one size, and how many tokens a page holds follows from the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quire.types.kv import KVGroupSpec

# Of what a group brings: slabs may have room for a plane more, in each page that it takes.
MAX_WASTE = 1 / 6


@dataclass(frozen=True, slots=True)
class Pages:
    groups: list[KVGroupSpec]  # with pages for blocks; the layers' groups come first
    splits: list[int]  # kernels' blocks in a page, by group
    slabs: int
    slab_bytes: int  # of a page
    keeper: int  # the group that keeps every token, and so the history of ids

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
    slabs, widths = _slabs(groups)
    slice_width = math.lcm(*widths)
    splits = [slice_width // width for width in widths]
    made = [
        msgspec.structs.replace(group, block_size=split * block_size)
        for group, split in zip(groups, splits, strict=True)
    ]
    slab_bytes = slice_width * block_size
    full = [number for number, group in enumerate(made) if group.keeps_all]
    if full:
        return Pages(made, splits, slabs, slab_bytes, full[0])
    history = KVGroupSpec("history", slab_bytes // 4, 1, 1, 1, 4, planes=1)  # it lies in the first slab alone
    return Pages([*made, history], [*splits, 1], slabs, slab_bytes, len(made))


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
