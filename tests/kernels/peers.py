"""Memory that ranks share, on a CPU: one mapping, of which each rank's buffer is a part."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from quire.distributed.peer_memory import Layout, PeerMemory
from quire.distributed.topology import Topology


def peers_in(file: Path, layout: Layout, rank: int) -> PeerMemory:
    """This rank's view of buffers in a file, which any process may map once `make_peers` has made it."""
    size = layout.offsets()[""]
    with file.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), size * layout.size)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    bases = [whole.data_ptr() + number * size for number in range(layout.size)]
    local = whole[rank * size : (rank + 1) * size]
    memory = PeerMemory(layout, Topology(rank, layout.size), local, bases)
    assert memory.views["once"].data_ptr() == bases[rank]
    return memory


def make_peers(file: Path, layout: Layout) -> list[PeerMemory]:
    """All ranks' views of a new file."""
    size = layout.offsets()[""]
    file.write_bytes(bytes(size * layout.size))
    ranks = [peers_in(file, layout, rank) for rank in range(layout.size)]
    for peers in ranks:
        PeerMemory.clear(peers._local, layout)
    return ranks
