"""Top-k, top-p and min-p: which tokens stay, and how likely each of them is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from quire.kernels.dispatch import plain_torch
from quire.kernels.sampling import sampling
from quire.kernels.sampling.state import CHUNK, SHORTLIST
from tests.effort import some
from tests.sampling.conftest import Backend
from tests.sampling.rows import chi_square_limit, columns, filtered_softmax


def drawn(backend: Backend, logits: torch.Tensor, row: dict[str, float], draws: int) -> torch.Tensor:
    """How often each token of one row of logits is drawn."""
    rows = columns([{**row, "seed": 3}])
    batch = logits.expand(draws, -1).contiguous()
    got = backend.sample(batch, rows, list(range(draws)), filtered=True, seats=[1] * draws)
    return torch.tensor(got).bincount(minlength=len(logits))


FILTERS = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 7, "min_p": 0.1, "top_p": 0.8, "temperature": 1.7},
    {"top_p": 0.9, "temperature": 0.4},
    {"top_k": 50, "top_p": 0.999},
]


@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(backend: Backend, row: dict[str, float]) -> None:
    draws = 4000 if backend.fast else 40
    logits = torch.randn(20) * 2
    expected = filtered_softmax(logits, **row) * draws
    counts = drawn(backend, logits, row, draws).double()
    live = expected > 0
    assert counts[~live].sum() == 0, "a token that was cut came up"
    if live.sum() > 1 and backend.fast:
        assert ((counts - expected)[live] ** 2 / expected[live]).sum() < chi_square_limit(int(live.sum()) - 1)


@pytest.mark.parametrize("row", [{"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.9}], ids=str)
def test_tied_tokens_share_their_fate(backend: Backend, row: dict[str, float]) -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0, 3.0, 3.0, 3.0, 1.0])
    counts = drawn(backend, logits, row, 400 if backend.fast else 20)
    assert counts.nonzero().squeeze(1).tolist() == [1, 2, 4, 5, 6]


def test_all_equal_logits_all_stay(backend: Backend) -> None:
    counts = drawn(backend, torch.zeros(5), {"top_k": 2, "top_p": 0.1, "min_p": 1.0}, 300 if backend.fast else 12)
    assert (counts > 0).all()


def test_fewer_finite_logits_than_top_k(backend: Backend) -> None:
    logits = torch.full((50,), -torch.inf)
    logits[[4, 40]] = 1.0
    for row in ({"top_k": 10}, {"top_k": 10, "top_p": 0.6}, {"top_p": 0.99}, {"min_p": 0.5, "top_k": 20}):
        assert drawn(backend, logits, row, 30).nonzero().squeeze(1).tolist() == [4, 40]


@pytest.mark.parametrize(
    ("warper", "row"),
    [
        (TopKLogitsWarper(9), {"top_k": 9}),
        (TopPLogitsWarper(0.8), {"top_p": 0.8}),
        (MinPLogitsWarper(0.05), {"min_p": 0.05}),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_the_kept_tokens_are_those_of_transformers(
    backend: Backend, warper: TopKLogitsWarper | TopPLogitsWarper | MinPLogitsWarper, row: dict[str, float]
) -> None:
    logits = torch.randn(40)
    kept = torch.isfinite(warper(None, logits.unsqueeze(0).clone())[0])
    counts = drawn(backend, logits, row, 4000 if backend.fast else 12)
    assert (counts[~kept] == 0).all()
    if backend.fast:
        assert (counts[kept] > 0).all()


def test_greedy_and_unfiltered_rows_beside_filtered_ones_are_not_touched(backend: Backend) -> None:
    logits = torch.randn(4, CHUNK + 300)
    rows = [{"temperature": 0}, {"seed": 8}, {"top_k": 2, "seed": 9}, {"temperature": 1.3, "seed": 4}]
    plain = backend.sample(logits, columns(rows), [5] * 4)
    mixed = backend.sample(logits, columns(rows), [5] * 4, filtered=True)
    assert mixed[0] == logits[0].argmax()
    assert [mixed[i] for i in (0, 1, 3)] == [plain[i] for i in (0, 1, 3)]


# Wide rows: the kernels take another way with the number of tokens that survive the first, cheap cut.
WIDE = [
    {"top_k": 20},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 900},
    {"top_p": 0.9, "temperature": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"min_p": 0.3},
    {"min_p": 0.01, "top_p": 0.9},
    {"top_k": 5000, "top_p": 0.8},
    {"top_k": 12000},
    {"min_p": 1e-7, "top_k": 15000, "top_p": 0.99, "temperature": 2.0},
]


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0], ids=["equal", "flat", "peaked"])
@pytest.mark.parametrize("row", WIDE, ids=str)
def test_wide_rows_agree_with_plain_torch(backend: Backend, row: dict[str, float], spread: float) -> None:
    if backend.name == "torch":
        pytest.skip("it is the reference here")
    rows = 24 if backend.fast else 2
    logits = torch.randn(rows, 2 * SHORTLIST + CHUNK + 321) * spread
    matrix = columns([{**row, "seed": seed} for seed in range(rows)])
    seats = torch.arange(1, rows + 1, dtype=torch.int32)
    out = torch.empty(rows, dtype=torch.int32)
    with plain_torch(False):
        sampling.sample(logits, matrix, seats, seats + 50, out, None, filtered=True)
    found = backend.sample(logits, matrix, (seats + 50).tolist(), filtered=True)
    # Sums of thousands of weights differ in their last bit: a draw on the border of two tokens may be either's.
    others = [i for i in range(rows) if found[i] != int(out[i])]
    assert len(others) <= 1
    for i in others:
        low, high = sorted((found[i], int(out[i])))
        assert filtered_softmax(logits[i], **row)[low : high + 1].count_nonzero() == 2


@pytest.mark.parametrize("row", [{"top_k": SHORTLIST + 9}, {"top_p": 0.3}], ids=str)
def test_a_long_row_of_two_neighbouring_floats_is_cut_between_them(backend: Backend, row: dict[str, float]) -> None:
    """Neither fits a short list, and no float lies between the two."""
    logits = torch.full((2 * SHORTLIST + 99,), 1.0)
    larger = torch.arange(len(logits)) % 64 < 34  # more than a short list
    logits[larger] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    counts = drawn(backend, logits, row, 200 if backend.fast else 3)
    assert counts[~larger].sum() == 0


@settings(max_examples=some(150), deadline=None)
@given(
    logits=st.lists(st.sampled_from([-torch.inf, -5.0, -1.0, -0.0, 0.0, 0.5, 2.0, 2.5]), min_size=2, max_size=12),
    row=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.01, 0.5, 1.0, 2.0]),
            "top_k": st.integers(0, 13),
            "top_p": st.sampled_from([1e-9, 0.25, 0.6, 0.95, 1.0]),
            "min_p": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        }
    ),
    seed=st.integers(0, 2**63 - 1),
)
def test_no_token_outside_the_filters(logits: list[float], row: dict[str, float], seed: int) -> None:
    values = torch.tensor(logits)
    row = {**row, "top_k": row["top_k"] if row["top_k"] < len(values) else 0}
    allowed = filtered_softmax(values, **row) > 0 if values.isfinite().any() else torch.arange(len(values)) == 0
    out = torch.empty(20, dtype=torch.int32)
    batch, seats = values.expand(20, -1).contiguous(), torch.ones(20, dtype=torch.int32)
    lengths = torch.arange(20, dtype=torch.int32)
    sampling.sample(batch, columns([{**row, "seed": seed}]), seats, lengths, out, None, filtered=True)
    assert allowed[out.long()].all()
