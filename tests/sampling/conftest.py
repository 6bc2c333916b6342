"""The same tests run on the CPU, in plain torch there and on a GPU, on a GPU, and on the Triton kernels under Triton's
interpreter.

The interpreter needs TRITON_INTERPRET=1 and an importable triton; it is slow, so those tests keep vocabularies small.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from quire.kernels.dispatch import plain_torch
from quire.kernels.sampling import sampling
from quire.kernels.sampling.sampling import History, Scratch
from quire.worker.logit_rows import logit_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
BACKENDS = [
    "torch",
    "plain",
    "interpreter",
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "plain, cuda")),
]


@dataclass(frozen=True)
class Backend:
    """`kernels.sampling.sampling` with the implementation chosen by hand."""

    name: str
    device: torch.device
    _sample: Callable[..., None]
    _penalize: Callable[..., None]

    @property
    def is_torch(self) -> bool:
        return self.name not in ("interpreter", "cuda")

    @property
    def fast(self) -> bool:
        return self.name != "interpreter"

    def sample(
        self,
        logits: torch.Tensor,
        columns: torch.Tensor,
        lengths: list[int],
        *,
        filtered: bool = False,
        seats: list[int] | None = None,
    ) -> list[int]:
        """Tokens of the rows; row i sits in seat i + 1 if no seats are given."""
        rows = len(logits)
        out = torch.full((rows,), -7, dtype=torch.int32, device=self.device)
        seats = list(range(1, rows + 1)) if seats is None else seats
        self._sample(
            logits.to(self.device),
            columns.to(self.device),
            torch.tensor(seats, dtype=torch.int32, device=self.device),
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
            out,
            None if self.is_torch else Scratch.allocate(rows, 1, logits.shape[1], self.device),
            filtered=filtered,
        )
        return out.tolist()

    def penalize(
        self,
        logits: torch.Tensor,
        columns: torch.Tensor,
        seats: torch.Tensor,
        lengths: torch.Tensor,
        history: History,
    ) -> torch.Tensor:
        logits = logit_rows(*logits.shape, self.device).copy_(logits)
        scratch = None if self.is_torch else Scratch.allocate(1, len(logits), logits.shape[1], self.device)
        table = history.block_table.to(self.device)
        history = History(history.token_of_slot.to(self.device), table, history.block_size)
        arguments = [tensor.to(self.device) for tensor in (columns, seats, lengths)]
        self._penalize(logits, *arguments, history, scratch)
        if scratch is not None:
            assert not scratch.counts.any(), "the counts must be left clean for the next step"
        return logits.cpu()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    name = request.param
    if name == "interpreter" and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1 and triton")
    if "cuda" in name and not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(0)
    if name == "interpreter":
        kernels, penalties = _triton()
        yield Backend(name, torch.device("cpu"), kernels.sample, penalties.penalize)
        return
    device = torch.device("cuda" if "cuda" in name else "cpu")
    with plain_torch("plain" in name):
        yield Backend(name, device, sampling.sample, sampling.penalize)


def _triton() -> tuple[ModuleType, ModuleType]:
    from quire.kernels.sampling.triton import penalties
    from quire.kernels.sampling.triton import sampling as kernels

    return kernels, penalties
