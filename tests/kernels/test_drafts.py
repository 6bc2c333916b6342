"""The kernels of steps with drafts: against a slow reference in plain Python, and Triton against torch."""

from __future__ import annotations

import random

import pytest
import torch

from quire.kernels import drafts as kernels
from quire.kernels.draft_state import DraftBuffers, DraftState
from quire.kernels.step import step
from quire.kernels.step.state import SeatState, StepBuffers

SEATS, SIZE, TABLE, DRAFTS = 8, 4, 20, 3
WIDTH = 1 + DRAFTS
LIMIT = SIZE * TABLE


def ints(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class World:
    """Texts in seats 1 … SEATS - 1, their last token not in the history yet."""

    def __init__(self, texts: dict[int, list[int]], device: torch.device, limits: dict[int, int] | None = None) -> None:
        rng = random.Random(5)
        blocks = [*range(1, SEATS * TABLE + 1)]
        rng.shuffle(blocks)
        table = [[0] * TABLE] + [[blocks.pop() for _ in range(TABLE)] for _ in range(SEATS - 1)]
        history = [-9] * (SIZE * (SEATS * TABLE + 1))
        for seat, text in texts.items():
            for position, token in enumerate(text[:-1]):
                history[table[seat][position // SIZE] * SIZE + position % SIZE] = token
        self.device, self.texts, self.table = device, texts, table
        self.seats = ints([*texts], device)
        self.state = SeatState(
            last_token=ints([texts[seat][-1] if seat in texts else 0 for seat in range(SEATS)], device),
            num_computed=ints([len(texts[seat]) - 1 if seat in texts else 0 for seat in range(SEATS)], device),
            block_table=ints(table, device),
            token_of_slot=ints(history, device),
            block_size=SIZE,
            limit=ints([0, *((limits or {}).get(seat, LIMIT) for seat in range(1, SEATS))], device),
        )
        self.drafts = DraftState(
            tokens=ints([[7000 + 10 * seat + i for i in range(DRAFTS)] for seat in range(SEATS)], device),
            count=ints([0] * SEATS, device),
            may_draft=ints([0] + [1] * (SEATS - 1), device),
        )

    def slot(self, seat: int, position: int) -> int:
        return self.table[seat][position // SIZE] * SIZE + position % SIZE

    def buffers(self, rows: int) -> tuple[StepBuffers, DraftBuffers]:
        def poisoned(n: int) -> torch.Tensor:
            return torch.full((n,), -77, dtype=torch.int32, device=self.device)

        tokens = rows * WIDTH
        out = StepBuffers(poisoned(tokens), poisoned(tokens), poisoned(tokens), poisoned(rows))
        return out, DraftBuffers(poisoned(tokens), poisoned(tokens), poisoned(rows), poisoned(rows))

    def propose(self, longest: int, shortest: int) -> dict[int, list[int]]:
        keys = torch.zeros(len(self.seats), dtype=torch.int32, device=self.device)
        kernels.propose_ngram(self.state, self.drafts, self.seats, keys, longest, shortest)
        assert not keys.any()
        counts, tokens = self.drafts.count.tolist(), self.drafts.tokens.tolist()
        return {seat: tokens[seat][: counts[seat]] for seat in self.texts}


def expected_draft(text: list[int], longest: int, shortest: int) -> list[int]:
    """By the definition: the longest end of the text that stood in it before, where it did so last."""
    for length in range(longest, shortest - 1, -1):
        end = text[-length:] if length <= len(text) else None
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == end:
                following = text[start + length :]
                return [following[i % len(following)] for i in range(DRAFTS)]
    return []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (3, 1), (5, 5), (4, 2)])
def test_a_draft_is_what_followed_the_longest_latest_match(
    device: torch.device, seed: int, longest: int, shortest: int
) -> None:
    rng = random.Random(seed)
    texts = {
        seat: [rng.randrange(2, 2 + rng.choice((2, 4, 12))) for _ in range(rng.choice((1, 2, 5, 30, 75)))]
        for seat in range(1, SEATS)
    }
    found = World(texts, device).propose(longest, shortest)
    assert found == {seat: expected_draft(text, longest, shortest) for seat, text in texts.items()}


def test_nothing_is_drafted_for_padding_and_for_who_may_not(device: torch.device) -> None:
    world = World({1: [5, 6] * 8, 2: [5, 6] * 8}, device)
    world.drafts.may_draft[1] = 0
    world.seats = ints([0, 1, 2], device)
    assert world.propose(3, 1) == {1: [], 2: [5, 6, 5]}
    assert world.drafts.count[0] == 0


def test_a_text_of_many_tiles_is_searched_to_its_beginning(device: torch.device) -> None:
    """Longer than what all programs look at in one round."""
    size, blocks = 64, 600
    text = [1000 + i for i in range(size * blocks - 8)]
    text[20:23] = text[-3:] = [1, 2, 3]
    state = SeatState(
        last_token=ints([0, text[-1]], device),
        num_computed=ints([0, len(text) - 1], device),
        block_table=ints([[0] * blocks, [*range(blocks, 0, -1)]], device),
        token_of_slot=torch.zeros(size * (blocks + 1), dtype=torch.int32, device=device),
        block_size=size,
        limit=ints([0, 0], device),
    )
    padded = torch.tensor([*text[:-1], *[0] * (size * blocks - len(text) + 1)], dtype=torch.int32)
    state.token_of_slot[size:] = padded.view(blocks, size).flip(0).flatten().to(device)
    drafts = DraftState(
        *(torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((2, 4), 2)), ints([0, 1], device)
    )
    kernels.propose_ngram(state, drafts, ints([1], device), ints([0], device), 3, 3)
    assert drafts.tokens[1].tolist() == text[23:27]


def test_rows_bring_their_drafts_up_to_their_limit(device: torch.device) -> None:
    texts = {seat: [100 * seat + i for i in range(10)] for seat in range(1, SEATS)}
    # Tokens that may still come: any, 3, 2, 1, none.
    world = World(texts, device, {2: 13, 3: 12, 4: 11, 5: 10})
    world.drafts.count[:] = ints([0, 3, 3, 3, 3, 3, 2, 0], device)
    world.seats = ints([0, *texts], device)
    out, more = world.buffers(SEATS)
    before = world.state.token_of_slot.tolist()
    kernels.gather_drafted(world.state, world.drafts, out, more, world.seats)
    used = more.used.tolist()
    assert used == [0, 3, 2, 1, 0, -1, 2, 0]
    ids, positions, slots = (buffer.view(SEATS, WIDTH).tolist() for buffer in (out.input_ids, out.positions, out.slots))
    lengths = more.lengths.view(SEATS, WIDTH).tolist()
    for seat in range(1, SEATS):
        count = used[seat]
        for place in range(WIDTH):
            if place <= count:
                token = texts[seat][-1] if place == 0 else 7000 + 10 * seat + place - 1
                at = world.slot(seat, 9 + place)
                assert (ids[seat][place], positions[seat][place], slots[seat][place]) == (token, 9 + place, at)
                before[at] = token
            else:
                assert slots[seat][place] == -1
            assert lengths[seat][place] == (10 + min(place, count) if count >= 0 else 9)
    assert out.seq_lens.tolist() == [1, 13, 12, 11, 10, 9, 12, 10]
    assert more.first_lens.tolist() == [1, 10, 10, 10, 10, 9, 10, 10]
    assert more.seats.view(SEATS, WIDTH).tolist() == [[seat] * WIDTH for seat in range(SEATS)]
    before[0] = 0  # padding writes where nobody reads
    assert world.state.token_of_slot.tolist() == before


@pytest.mark.parametrize("seed", range(4))
def test_tokens_count_up_to_the_first_draft_that_is_wrong(device: torch.device, seed: int) -> None:
    rng = random.Random(seed)
    texts = {seat: [100 * seat + i for i in range(rng.randint(1, 40))] for seat in range(1, SEATS)}
    world = World(texts, device, {3: len(texts[3])})
    counts = [0, *(rng.randint(0, DRAFTS) for _ in texts)]
    world.drafts.count[:] = ints(counts, device)
    world.seats = ints([0, *texts], device)
    out, more = world.buffers(SEATS)
    kernels.gather_drafted(world.state, world.drafts, out, more, world.seats)
    drafts = out.input_ids.view(SEATS, WIDTH)[:, 1:].tolist()
    sampled = [[rng.choice((draft, 1)) for draft in line] + [2] for line in drafts]
    outcome = torch.full((SEATS, WIDTH + 2), -5, dtype=torch.int32, device=device)
    flat = ints(sampled, device).flatten()
    kernels.commit_drafted(world.state, outcome, more, world.seats, out.input_ids, flat)
    for seat, line in enumerate(outcome.tolist()):
        used = 0 if seat == 3 else counts[seat]
        right = 0
        while right < used and sampled[seat][right] == drafts[seat][right]:
            right += 1
        took = sampled[seat][: right + 1] if seat != 3 else []
        assert line == [*took, *[-1] * (WIDTH - len(took)), used, right]
        if seat:
            assert world.state.num_computed[seat] == len(texts[seat]) - 1 + len(took)
            assert world.state.last_token[seat] == [*texts[seat], *took][-1]
    assert world.state.num_computed[0] == world.state.last_token[0] == 0


def test_a_plain_step_says_what_a_draft_would_have_been_worth(device: torch.device) -> None:
    world = World({seat: [seat] for seat in range(1, SEATS)}, device)
    world.drafts.count[:] = ints([0, 3, 1, 0, 3, 3, 3, 3], device)
    world.drafts.may_draft[5] = 0
    tokens = ints([7010, 1, 7030, 7040, 7050, 7060, -1], device)
    outcome = torch.zeros((SEATS - 1, WIDTH + 2), dtype=torch.int32, device=device)
    kernels.probe(world.drafts, outcome, world.seats, tokens, 5)
    assert outcome[:, 0].tolist() == tokens.tolist()
    assert outcome[:, -2:].tolist() == [[1, 1], [1, 0], [0, 0], [1, 1], [0, 0], [0, 0], [0, 0]]


def test_a_row_at_its_limit_writes_nothing_in_any_step(device: torch.device) -> None:
    """Neither in one of decode rows only, nor beside a prompt."""
    for decode_only in (True, False):
        world = World({1: [*range(10, 20)], 2: [*range(30, 40)], 3: [*range(50, 60)]}, device, {2: 10})
        rows, before = 3, world.state.token_of_slot.tolist()
        out, _ = world.buffers(rows)
        if decode_only:
            out = StepBuffers(out.input_ids[:3], out.positions[:3], out.slots[:3], out.seq_lens)
            step.gather_decode(world.state, out, world.seats)
            before[world.slot(3, 9)] = 59
        else:
            out = StepBuffers(out.input_ids[:4], out.positions[:4], out.slots[:4], out.seq_lens)
            step.gather(world.state, out, world.seats, ints([0, 1, 2, 4], device), ints([8, 9], device), 2, 4)
            before[world.slot(3, 9)], before[world.slot(3, 10)] = 8, 9
        before[world.slot(1, 9)] = 19
        assert out.slots[1] == -1
        assert out.seq_lens.tolist() == [10, 9, 10 if decode_only else 11]
        assert world.state.token_of_slot.tolist() == before
