"""One rank of a model that several share, run without an engine.

python -m tests.distributed.sharded RANK SIZE MEETING OUT FOLDER…    FOLDER=dummy: with random weights
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from quire.config.model_info import read_model_info
from quire.distributed.group import Group
from quire.distributed.sums_under_way import Steps, SumsUnderWay
from quire.kernels.across_ranks import from_first, reduce_add, reduce_add_reference
from quire.kernels.elementwise.norm import rms_norm
from quire.layers import norm as norms
from quire.models import catalog, weights
from quire.models.base import DecoderStack
from quire.types.ranks import Rank
from tests.models.paged import PagedRows

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]]


class Small(Steps):
    """Steps of a few rows, in pieces that nothing divides."""

    def piece_rows(self, rows: int) -> int:
        return min(rows, 7)


class Late:
    """Travel that takes until it is waited for. Until then there is nothing to be read."""

    def __init__(self, rows: torch.Tensor, group: Group) -> None:
        self.rows, self.group, self.number = rows, group, 0
        self.begun: list[tuple[int, slice, torch.Tensor, torch.Tensor]] = []

    def begin(self, partial: torch.Tensor, first: int) -> int:
        self.number += 1
        at = slice(first, first + len(partial))
        self.begun.append((self.number, at, partial, self.rows[at].clone()))
        self.rows[at] = torch.nan
        return self.number

    def finish(self, number: int) -> None:
        due = [one for one in self.begun if one[0] <= number]
        self.begun = self.begun[len(due) :]
        for _, at, partial, before in due:
            self.rows[at] = self.group.reduce_add(partial.clone(), before)


class NormedSums:
    """Sums over ranks that norm what they make for who reads it next, however few rows there are; and how many did."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(
        self, partial: torch.Tensor, residual: torch.Tensor, norm: tuple[torch.Tensor, float], group: Group
    ) -> torch.Tensor | None:
        reduce_add(partial, residual, group)
        if group.under_way is not None:
            return None
        self.made += 1
        return rms_norm(residual, *norm)


def in_pieces(model: DecoderStack, group: Group) -> torch.Tensor | None:
    """The same logits where sums over ranks are under way; None: there is a layer that would not wait for them."""
    if not model.takes_pieces:
        return None
    rows = torch.zeros(64, model.hidden)
    late = Late(rows, group)
    group.under_way = SumsUnderWay(Small(group.topology.size, model.hidden, rows.dtype, 64, 1), rows, late)  # type: ignore[arg-type]
    try:
        found = logits_of(model)
    finally:
        group.under_way = None
    assert late.number >= 2 * 3 * len(model.layers)
    assert not late.begun
    return found


def load(name: str, group: Group | None = None) -> DecoderStack:
    folder, _, load_format = name.partition("=")
    info = read_model_info(Path(folder), {})
    model = catalog.build(info, torch.float32, CPU, info.max_position, group=group)
    weights.load(model, Path(folder), load_format or "auto", seed=3)
    return model


def sums_of(group: Group) -> list[torch.Tensor]:
    """Of what every rank brings, in rounds that would show another order of the same numbers."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        parts = [torch.randn(5, 64, generator=generator).to(dtype) for _ in range(group.topology.size)]
        residual = torch.randn(5, 64, generator=generator).to(dtype)
        wanted = reduce_add_reference(parts, residual)
        found.append(reduce_add(parts[group.topology.rank], residual, group))
        assert torch.equal(found[-1], wanted)
    return found


def logits_of(model: DecoderStack) -> torch.Tensor:
    """Of two prompts and of four tokens that follow each, and the rows of the head that some tokens have."""
    with torch.inference_mode():
        rows = PagedRows(model, max_rows=2, max_seq_len=64)
        found = rows.step([1, 2], PROMPTS)
        for token in (11, 12, 13, 14):
            found += rows.step([1, 2], [[token], [token + 1]])
        tokens = (0, model.sizes.vocab // 2, model.sizes.vocab - 1) if model.logits_are_products else ()
        heads = [model.output_row(token)[None].repeat(1, 2) for token in tokens]
        width = max(part.shape[1] for part in (*found, *heads))
        return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in (*found, *heads)])


def main(rank: str, size: str, meeting: str, out: str, *names: str) -> None:
    torch.set_num_threads(1)
    group = Group(Rank(int(rank), int(size), meeting), CPU)
    sums_of(group)
    found, took_pieces, normed = [], [], []
    for name in names:
        model = load(name, group)
        norms.reduce_add_norm = sums = NormedSums()  # type: ignore[assignment]
        found.append(logits_of(model))
        normed.append(sums.made)
        late = in_pieces(model, group)
        took_pieces.append(late is not None)
        if late is not None and rank == "0":  # who has the logits
            torch.testing.assert_close(late, found[-1], rtol=1e-4, atol=1e-4)
    torch.save((found, took_pieces, normed), f"{out}{rank}")
    tokens = torch.full((3,), int(rank), dtype=torch.int32)
    assert from_first(tokens, group).tolist() == [0, 0, 0]
    assert group.smallest(5 + int(rank), 9 - int(rank)) == [5, 10 - int(size)]
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
