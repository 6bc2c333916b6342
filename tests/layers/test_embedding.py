"""A table of embeddings as a head: each rank's logits, wherever they go."""

from __future__ import annotations

import pytest
import torch

from quire.distributed.topology import Topology
from quire.layers.embedding import Embedding
from quire.layers.norm import RMSNorm


@pytest.mark.parametrize(("size", "vocab"), [(1, 97), (2, 97), (4, 97), (4, 5)])
def test_shares_of_logits_in_memory_of_their_own_and_in_rows_of_all(size: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(1)
    table, norm = Embedding(vocab, 16), RMSNorm(16, 1e-5)
    table.weight.copy_(torch.randn(vocab, 16, generator=generator))
    norm.weight.fill_(1.5)
    x = torch.randn(3, 16, generator=generator)
    whole = norm(x) @ table.weight.T
    for rank in range(size):
        table.share_with(Topology(rank, size))
        begin, end, room = table.share
        own = table.wide(x, norm)
        assert own.shape == (3, room)
        rows = torch.zeros(3, 128)[:, :vocab]
        out = rows[:, :room]
        found = table.wide(x, norm, out)
        assert found.data_ptr() == rows.data_ptr()
        assert found.shape == (3, room)
        for logits in (own, out):
            torch.testing.assert_close(logits[:, : end - begin], whole[:, begin:end])
        assert not rows[:, room:].any()
