"""What is said of choices of experts: the rule, whose tokens count, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from quire.kernels.moe.tiling import Tiling

Scoring = Literal["softmax", "sigmoid", "sparse_mixer"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How logits become choices and weights.

    groups, top_groups: experts stand in so many groups of neighbours, and only those of the best `top_groups` may be
    chosen; a group is as good as its best `group_best` experts together. renormalize: the weights of the chosen are
    divided by their sum, or by `least_sum` if that is more. scale: of the weights, at last. jitter: of the sparse
    mixer, how far below the best a logit may lie (relative, twice this) to count.
    """

    experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    least_sum: float = 1e-20
    jitter: float = 0.01


class Live(NamedTuple):
    """Which tokens are somebody's: those with a slot in the cache outside of its null block.

    The others, padding of graphs, are sent to no expert.
    """

    slots: torch.Tensor  # int32 [tokens]
    first: int  # the least slot of a living token

    def of(self, tokens: slice) -> Live:
        return Live(self.slots[tokens], self.first)


class Here(NamedTuple):
    """Which experts this rank has, of those that are spread over ranks whole. An expert with copies on several ranks
    is each one's in turn, by token.

    slots int32 [experts, copies at most]: of each copy its place here, -1 if it is another rank's; at most one of an
    expert is here. copies int32 [experts]. loads int32 [experts]: counts what has been chosen.
    """

    slots: torch.Tensor
    copies: torch.Tensor
    loads: torch.Tensor
    num_slots: int


class Routes(NamedTuple):
    """experts int32 [tokens, top_k], -1 throughout for a token that is nobody's; where ranks have experts whole, slots
    of this rank, and -1 for experts of others. weights float32 of the same shape, 0 there.

    tiling: on a GPU, what kernels work through; None where they need no order.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    tiling: Tiling | None = None
