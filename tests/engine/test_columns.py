"""A prompt is a column from the front end to the plan: nothing in the core makes Python objects of its tokens."""

from __future__ import annotations

import tracemalloc

import numpy as np

from quire.engine.messages import Add, ToCore
from quire.foundation.wire import Decoder, Encoder
from quire.scheduling.scheduler import Scheduler
from tests.engine.echo_worker import make_request
from tests.scheduling.simulator import groups

LENGTH = 32_768
ROW = 8 + 28  # bytes of an int in a list


def test_no_list_of_a_prompt_is_made_in_the_core() -> None:
    """Told by what is allocated: the column is copied once, and named by arrays of eight bytes a token."""
    scheduler = Scheduler(
        max_num_seqs=4, max_num_batched_tokens=LENGTH, max_model_len=2 * LENGTH, num_blocks=LENGTH, groups=groups(16)
    )
    encoder, decoder = Encoder(), Decoder[Add](ToCore)
    rng = np.random.default_rng(0)
    peaks, planned = [], []
    for number in range(2):  # the first makes what the process keeps
        ids = rng.integers(256, 120_000, LENGTH).tolist()
        frames = [bytes(frame) for frame in encoder.encode(Add(make_request(f"r{number}", ids, 4)))]
        assert len(frames) == 2, "long columns travel beside the message"
        tracemalloc.start()
        scheduler.add(decoder.decode(frames).request)
        in_core = tracemalloc.get_traced_memory()[1]
        plan = scheduler.plan()
        peaks.append((in_core, tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
        assert plan is not None
        assert plan.token_ids.tolist() == ids
        planned.append(plan)
        scheduler.abort([f"r{number}"])
    in_core, with_plan = peaks[-1]
    assert 4 * LENGTH < in_core < 6 * LENGTH
    assert with_plan < ROW * LENGTH
