"""One rank of a model that several share, run without an engine.

python -m tests.distributed.sharded RANK SIZE MEETING OUT FOLDER…    FOLDER=dummy: with random weights
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from quire.config.model_info import read_model_info
from quire.distributed.group import Group
from quire.kernels.across_ranks import from_first, reduce_add, reduce_add_reference
from quire.models import catalog, weights
from quire.models.base import DecoderStack
from quire.types.ranks import Rank
from tests.models.paged import PagedRows

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]]


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
    torch.save([logits_of(load(name, group)) for name in names], f"{out}{rank}")
    tokens = torch.full((3,), int(rank), dtype=torch.int32)
    assert from_first(tokens, group).tolist() == [0, 0, 0]
    assert group.smallest(5 + int(rank), 9 - int(rank)) == [5, 10 - int(size)]
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
