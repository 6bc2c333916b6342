"""Memory that every rank of a host can write: how it is laid out, and on GPUs where it comes from.

Each rank has one buffer of the same layout, mapped by all. What a rank wants others to know it writes into *their*
buffers: a write needs no answer, a read from afar would wait for one.

Where words go that are added up, -1 stands until they come: nobody sends that, and who has read them puts it there
again. A place is used in turns. Even and odd uses of a row have memory of their own, so one meeting a use is enough:
who is at its use k + 2 has heard of its peers' use k + 1, which they began when they were done with k.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist

from quire.distributed.topology import Topology

logger = logging.getLogger(__name__)

RANKS_FOR_TWICE = 4  # from which on a longer message goes to the rank which adds it up, and back
FEW_BYTES = 128 * 1024  # of a message that is not longer
MANY_BYTES = 16 * 1024**2  # that a rank sends in one message, or that goes in two trips
PIECE = 512  # words of a row that one program brings over
CHUNK = 2048  # columns of logits that one program brings over
_LINE = 32  # numbers that a row of logits begins on a multiple of, where products have fast kernels for
_ALIGNED = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of what ranks tell each other. All of the same on every rank.

    hidden, itemsize: of an activation's row. max_rows: of any step. vocab, logit_rows: of the logits that the first
    rank collects; 0: none. drafts: numbers that say what is drafted for all seats.
    """

    size: int
    hidden: int
    itemsize: int
    max_rows: int
    vocab: int = 0
    logit_rows: int = 0
    drafts: int = 0

    @property
    def words(self) -> int:
        """32-bit words of a row."""
        return self.hidden * self.itemsize // 4

    @property
    def goes_twice(self) -> bool:
        """Whether long messages take two trips: each row to the one rank that adds it up, and back."""
        return self.size >= RANKS_FOR_TWICE

    @property
    def pieces(self) -> int:
        """Of a row, of which each has a program."""
        return -(-self.words // PIECE)

    @property
    def once_rows(self) -> int:
        """That go in one message straight to all ranks."""
        most = FEW_BYTES if self.goes_twice else MANY_BYTES // max(self.size - 1, 1)
        return max(1, min(self.max_rows, most // (4 * self.words)))

    @property
    def twice_rows(self) -> int:
        """That go in one message to the ranks which add them up."""
        return max(1, min(self.max_rows, MANY_BYTES // (4 * self.words))) if self.goes_twice else 0

    @property
    def chunks(self) -> int:
        return -(-self.vocab // CHUNK)

    def parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Of a buffer, in the order in which they lie."""
        return {
            "once": (torch.int32, (2, self.size, self.once_rows, self.words)),
            # Parts by where they come from, and sums by who made them, of every rank's rows.
            "twice": (torch.int32, (2, 2 * self.size, -(-self.twice_rows // self.size), self.words)),
            # Of pieces of such sums, for the programs of each other.
            "squares": (torch.int32, (2, -(-self.twice_rows // self.size) * self.size, self.pieces, self.pieces)),
            "tokens": (torch.int64, (2, max(self.logit_rows, 1))),
            "drafts": (torch.int64, (2, max(self.drafts, 1))),
            "masses": (torch.int64, (2, self.size, max(self.logit_rows, 1), 2)),
            "drawn": (torch.int64, (2, max(self.logit_rows, 1))),
            "logits": (torch.float32, (self.logit_rows, -(-self.vocab // _LINE) * _LINE)),
            "logits_here": (torch.int32, (self.size, self.logit_rows * self.chunks)),
        }

    @property
    def squares_at(self) -> int:
        """Words from "twice" to "squares"."""
        offsets = self.offsets()
        return (offsets["squares"] - offsets["twice"]) // 4

    def offsets(self) -> dict[str, int]:
        """Bytes before each part, and before the end ("")."""
        sizes = [-(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED for dtype, shape in self.parts().values()]
        return dict(zip((*self.parts(), ""), accumulate(sizes, initial=0), strict=True))


class PeerMemory:
    """local: this rank's buffer, which `clear` has made empty, uint8 [layout's bytes]; bases: addresses at which this
    process finds each rank's."""

    def __init__(self, layout: Layout, topology: Topology, local: torch.Tensor, bases: list[int]) -> None:
        self.layout, self.topology, self.device = layout, topology, local.device
        offsets = layout.offsets()
        self.views = {
            name: local[offsets[name] : offsets[name] + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (dtype, shape) in layout.parts().items()
        }
        # Addresses of a part of each rank's buffer, as kernels read them.
        self.bases = {
            name: torch.tensor([base + offsets[name] for base in bases], dtype=torch.int64, device=local.device)
            for name in self.views
        }
        counted = {
            "once": layout.once_rows * layout.pieces,
            "twice": layout.twice_rows * layout.pieces,
            "tokens": 1,
            "drafts": 1,
            "masses": max(layout.logit_rows, 1),
            "logits": layout.logit_rows * layout.chunks,
        }
        # How often each row has been used: nobody else's business.
        self.uses = {
            name: torch.zeros(count, dtype=torch.int32, device=local.device) for name, count in counted.items()
        }
        self._local = local

    @property
    def logits(self) -> torch.Tensor | None:
        """float32 [rows, vocab] where the first rank collects logits; None if it does not. Other ranks have as much
        room, of which they use their own."""
        return self.views["logits"][:, : self.layout.vocab] if self.layout.logit_rows else None

    @staticmethod
    def clear(local: torch.Tensor, layout: Layout) -> None:
        """Makes a buffer what it is before its first use. Where sums go, every word is -1, which none of them is."""
        local.zero_()
        offsets = layout.offsets()
        for name in ("once", "twice", "squares"):
            shape = layout.parts()[name][1]
            local[offsets[name] : offsets[name] + 4 * prod(shape)].fill_(0xFF)

    @classmethod
    def on_gpu(
        cls, layout: Layout, topology: Topology, device: torch.device, ranks: dist.ProcessGroup
    ) -> PeerMemory | None:
        """All ranks call it together. None, on all of them, where they cannot write each other's memory."""
        import torch.distributed._symmetric_memory as symmetric_memory

        local = bases = None
        try:
            local = symmetric_memory.empty(layout.offsets()[""], dtype=torch.uint8, device=device)
            handle = symmetric_memory.rendezvous(local, ranks)
            bases = [int(pointer) for pointer in handle.buffer_ptrs]
            cls.clear(local, layout)
        except (RuntimeError, AttributeError, TypeError) as error:
            logger.warning("ranks meet through the library alone: no memory of their own to share: %s", error)
        torch.cuda.synchronize(device)
        able = torch.tensor([local is not None and bases is not None], dtype=torch.int32, device=device)
        dist.all_reduce(able, dist.ReduceOp.MIN, group=ranks)  # nobody writes before all have their zeros
        if not int(able) or local is None or bases is None:
            return None
        memory = cls(layout, topology, local, bases)
        memory._handle = handle  # type: ignore[attr-defined]  # the mappings live as long as it
        return memory
