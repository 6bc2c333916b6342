"""Which steps hold a prompt chunk that attends to many tokens before it, and how many all of a step's attend to."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from quire.attention.base import FAR
from quire.types.plan import Admit
from quire.types.sampling import SamplingParams
from quire.worker.batch import BatchBuilder, prompt_work
from quire.worker.seats import DeviceSeats
from quire.worker.trial_steps import prompt_chunks


def test_a_chunk_is_far_by_what_its_seat_holds_now() -> None:
    device = torch.device("cpu")
    seats = DeviceSeats(4, 8, torch.zeros(64, dtype=torch.int32), 16, device)
    builder = BatchBuilder(seats, None, 4, 64, 128, device)

    def is_far(*chunks: int, admits: tuple[tuple[int, int], ...] = (), num_decodes: int = 0) -> bool:
        rows = np.array(chunks, dtype=np.int32)
        taken = [Admit(seat, computed, 9, SamplingParams(), [], 0) for seat, computed in admits]
        plan = prompt_chunks(np.full(len(rows), 2, np.int32), taken, seats=rows)
        return builder.is_far(msgspec.structs.replace(plan, num_decodes=num_decodes))

    seats.num_computed_np[:] = [0, 10, FAR - 1, FAR, 3 * FAR]
    assert not is_far(1, 2)
    assert is_far(1, 3)
    assert is_far(4)
    assert not is_far(4, 1, num_decodes=1)  # a decode row is not
    assert not is_far(4, admits=((4, 0),))  # somebody new sits there
    assert is_far(1, admits=((1, FAR),))  # whose beginning was cached
    assert seats.num_computed_np[4] == 3 * FAR  # nothing is taken over by asking


def test_what_prompts_see_is_counted() -> None:
    work = prompt_work(np.array([2, 3], np.int32), np.array([12, 8], np.int32))
    assert work == (20, 11 + 12 + 6 + 7 + 8)
