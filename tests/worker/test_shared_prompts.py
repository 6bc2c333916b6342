"""What copies that share long prompts compute each: together the step, alike in tokens and in what these see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attention.base import FAR
from quire.attention.context import AttentionInputs
from quire.config.parallel.contexts import least_tokens
from quire.distributed.contexts import Contexts
from quire.kernels.step.step import StepBuffers
from quire.models.base import GivenEmbeddings
from quire.types.plan import StepPlan
from quire.worker.batch import Batch, round_size
from quire.worker.shared_prompts import OwnPart, SharedPrompts

CPU = torch.device("cpu")
CASES = {  # decode rows, prompt chunks, tokens before each row
    "one prompt": (0, [1000], [0]),
    "a long one": (0, [20_000], [0]),
    "one that goes on": (0, [999], [5000]),
    "beside decode rows": (3, [400, 1, 77], [9, 1, 30, 0, 64, 128]),
    "many short ones": (2, [10] * 33, [5] * 35),
    "a far one": (1, [640], [7, FAR - 500]),
}


def step(case: str) -> tuple[StepPlan, Batch, np.ndarray]:
    """A plan, all of it as it would be on the device, and what of each seat is computed."""
    decodes, chunks, before = CASES[case]
    counts = np.array([1] * decodes + chunks, dtype=np.int32)
    seats = np.arange(1, len(counts) + 1, dtype=np.int32)[::-1].copy()
    computed = np.zeros(len(counts) + 1, dtype=np.int32)
    computed[seats] = before
    starts = np.concatenate([[0], np.cumsum(counts)])
    positions = np.concatenate([np.arange(n) + computed[seat] for n, seat in zip(counts, seats, strict=True)])
    tokens = torch.from_numpy
    plan = StepPlan(
        step=0, admits=[], seats=seats, num_tokens=counts, num_decodes=decodes,
        token_ids=np.zeros(sum(chunks), dtype=np.int32), samples=np.ones(len(counts), dtype=bool), blocks=[],
        max_seq_len=int((computed[seats] + counts).max()),
    )  # fmt: skip
    buffers = StepBuffers(
        tokens(np.arange(len(positions), dtype=np.int32)), tokens(positions.astype(np.int32)),
        tokens(np.arange(len(positions), dtype=np.int32)), tokens(computed[seats] + counts),
    )  # fmt: skip
    attention = AttentionInputs(
        len(counts), len(positions), decodes, max(chunks), plan.max_seq_len, tokens(seats), tokens(starts),
        buffers.seq_lens, torch.zeros(0), seats_host=[],
    )  # fmt: skip
    batch = Batch(len(counts), len(positions), tokens(seats), buffers, attention, None, None, None, np.zeros(0))
    return plan, batch, computed


def parts(case: str, copies: int) -> tuple[Batch, list[OwnPart]]:
    plan, batch, computed = step(case)
    every = [
        SharedPrompts(Contexts(n, copies, CPU, None), computed, round_size).part(plan, batch) for n in range(copies)
    ]
    assert all(every)
    return batch, [part for part in every if part]


@pytest.mark.parametrize("copies", [2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_each_token_is_computed_once_and_found_again(case: str, copies: int) -> None:
    decodes = CASES[case][0]
    batch, every = parts(case, copies)
    (size,) = {part.batch.num_tokens for part in every}
    assert size == round_size(size)
    assert all(len(part.tokens) < size for part in every)  # nobody's token is there for what is nobody's
    whole = torch.cat([torch.nn.functional.pad(part.tokens, (0, size - len(part.tokens)), value=-1) for part in every])
    for part in every:
        assert whole[part.places.long()].tolist() == list(range(batch.num_tokens))
        assert part.tokens[:decodes].tolist() == list(range(decodes))  # every copy has these
        slots = part.batch.buffers.slots
        assert slots[: len(part.tokens)].tolist() == list(range(1, len(part.tokens) + 1))
        assert (slots[len(part.tokens) :] == -1).all()
    prompt = torch.cat([part.tokens[decodes:] for part in every])
    assert sorted(prompt.tolist()) == list(range(decodes, batch.num_tokens))


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_rows_say_where_their_tokens_stand(case: str, copies: int) -> None:
    """Query j of a row with n of them sees seq_len - n + j + 1 tokens: those up to its own position."""
    batch, every = parts(case, copies)
    owner = np.repeat(batch.attention.seats.numpy(), np.diff(batch.attention.query_start.numpy()))
    for part in every:
        inputs = part.batch.attention
        starts, lengths, seats = (
            np.array(each) for each in (inputs.query_start_host, inputs.seq_lens_host, inputs.seats_host)
        )
        counts = np.diff(starts)
        assert inputs.num_rows == len(seats) == len(counts)
        assert (counts[: inputs.num_decodes] == 1).all()
        assert counts[inputs.num_decodes :].max() == inputs.max_query_len
        seen = np.concatenate([end - n + np.arange(n) + 1 for end, n in zip(lengths, counts, strict=True)])
        own = len(part.tokens)
        assert seen.tolist() == (part.batch.buffers.positions[:own] + 1).tolist()
        assert np.repeat(seats, counts).tolist() == owner[part.tokens.numpy()].tolist()
        assert part.batch.buffers.input_ids[:own].tolist() == part.tokens.tolist()
        before = lengths - counts
        assert inputs.is_far == (before[inputs.num_decodes :] >= FAR).any()
        decodes = inputs.num_decodes
        assert inputs.prompts == (lengths[decodes:].sum(), seen[decodes:].sum())


@pytest.mark.parametrize("copies", [2, 4, 8])
def test_a_long_prompt_is_as_much_work_for_each(copies: int) -> None:
    _, every = parts("a long one", copies)
    work = [float(part.batch.buffers.positions[: len(part.tokens)].sum()) for part in every]
    assert max(work) < 1.03 * min(work)
    assert max(len(part.tokens) for part in every) - min(len(part.tokens) for part in every) <= 2 * copies


def test_few_tokens_are_everybodys() -> None:
    plan, batch, computed = step("one prompt")
    for device in ("cuda", "cpu"):
        most = len(plan.token_ids) // least_tokens(1, on_cpu=device == "cpu")
        for copies, is_shared in ((most, True), (most + 1, False)):
            shared = SharedPrompts(Contexts(0, copies, torch.device(device), None), computed, round_size)
            assert (shared.part(plan, batch) is not None) == is_shared


def test_embeddings_that_were_given_go_where_their_tokens_are() -> None:
    _, every = parts("beside decode rows", 2)
    tokens = torch.tensor([3, 50, 300, 402, 480])
    values = torch.arange(5.0)[:, None] + 1
    found = {}
    for part in every:
        mine = part.given(GivenEmbeddings(tokens, values))
        assert mine is not None
        rows = torch.zeros(part.batch.num_tokens, 1).index_copy_(0, mine.tokens, mine.values)
        own = {int(part.tokens[place]): float(rows[place, 0]) for place in range(len(part.tokens))}
        found |= {token: value for token, value in own.items() if value}
        assert set(own) >= {token for token in own if own[token]}
        assert part.given(None) is None
    assert found == {3: 1.0, 50: 2.0, 300: 3.0, 402: 4.0, 480: 5.0}
