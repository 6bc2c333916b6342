"""The Sampler as the worker uses it: seats are admitted, steps are sampled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from quire.types.plan import TokenMasks
from quire.worker.sampling import sampler as module
from quire.worker.sampling.logprobs import LogprobTensors, prompt_logprobs
from tests.sampling.bench import VOCAB, Bench


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(0)
    return torch.device(request.param)


def falling(rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    """Token 0 is the best, then 1, 2, …"""
    return torch.linspace(5, -5, vocab).expand(rows, -1).clone()


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"temperature": 0.0, "top_p": 0.5, "seed": 4}, True),
        ({"top_k": VOCAB}, True),
        ({"temperature": 1.0, "top_p": 0.5}, False),
        ({"min_tokens": 1}, False),
        ({"logprobs": 0}, False),
        ({"presence_penalty": 0.1}, False),
        ({"logit_bias": {3: 1.0}}, False),
    ],
)
def test_what_was_admitted_tells_which_steps_are_plain(params: dict[str, Any], plain: bool) -> None:
    """Later steps do not: ranks that sample nothing know no more."""
    bench = Bench(torch.device("cpu"), ({}, [1]), (params, [1]), ({}, [1]))
    every = np.array([1, 2, 3])
    for _ in range(3):
        columns = bench.sampler.columns
        assert columns.is_plain(every) == plain
        assert columns.is_plain(every[::2])
        bench.tokens(falling(3))


# -- lists --------------------------------------------------------------------------------------------------------


def test_allowed_ids_leave_nothing_else(device: torch.device) -> None:
    bench = Bench(
        device, ({"allowed_token_ids": [40, 30, 30]}, [1]), ({}, [1]), ({"allowed_token_ids": [59, 999]}, [1])
    )
    assert bench.tokens(falling(3)) == [30, 0, 59]


def test_bad_words_are_those_of_transformers(device: torch.device) -> None:
    words = [[0], [7, 1], [3, 7, 2], [9, 9, 9, 9, 3], [8, 4]]
    tokens = [[5, 3, 7], [7, 3, 7], [4, 7], [1, 9, 9, 9, 9], [3, 7, 8], [9, 9, 9]]
    bench = Bench(device, *(({"bad_words_token_ids": words}, row) for row in tokens))
    logits = falling(len(tokens))
    expected = []
    for i, row in enumerate(tokens):
        banned = NoBadWordsLogitsProcessor(words, eos_token_id=-1)(torch.tensor([row]), logits[i : i + 1].clone())
        expected.append(int(banned.argmax()))
    assert bench.tokens(logits) == expected == [3, 3, 2, 1, 1, 1]


def test_a_bad_word_may_span_the_whole_history(device: torch.device) -> None:
    words = {"bad_words_token_ids": [[7, 0], [7, 7, 1]]}
    bench = Bench(device, (words, [7]), (words, [7, 7]), (words, [8]))
    assert bench.tokens(falling(3)) == [1, 2, 0]


def test_stop_tokens_wait_for_min_tokens(device: torch.device) -> None:
    request = {"min_tokens": 2, "stop_ids": [0, 2, 4000], "num_prompt": 3}
    tokens = [[7] * 3, [7] * 4, [7] * 5, [7] * 9]
    bench = Bench(device, *((request, row) for row in tokens))
    assert bench.tokens(falling(4)) == [1, 1, 0, 0]


def test_min_tokens_costs_nothing_once_it_is_met(device: torch.device) -> None:
    bench = Bench(device, ({"min_tokens": 2, "stop_ids": [0]}, [1]))
    seats = bench.seats.numpy()
    for _ in range(2):
        assert bench.sampler.features(seats).lists
        bench.sample(falling())
    assert bench.sampler.features(seats).plain


def test_logit_bias_is_added(device: torch.device) -> None:
    bench = Bench(device, ({"logit_bias": {0: -100, 31: 100, 32: 50}}, [1]), ({"logit_bias": {2: 0.5}}, [1]))
    assert bench.tokens(falling(2)) == [31, 2]


def test_lists_come_before_penalties_and_greedy_is_exact_after_both(device: torch.device) -> None:
    params = {"logit_bias": {5: 10.0}, "repetition_penalty": 4.0, "bad_words_token_ids": [[0]]}
    logits = falling()
    edited = logits.clone()
    edited[0, 5] += 10
    edited[0, 0] = -math.inf
    edited = RepetitionPenaltyLogitsProcessor(4.0)(torch.tensor([[5, 1]]), edited)
    bench = Bench(device, (params, [5, 1]))
    assert bench.tokens(logits) == [int(edited.argmax())] == [2]


def test_a_seat_that_changes_hands_forgets_its_old_request(device: torch.device) -> None:
    bench = Bench(device, ({"allowed_token_ids": [44]}, [1]))
    assert bench.tokens(falling()) == [44]
    bench.sampler.admit([bench.seated(1, {"allowed_token_ids": [45]})])
    assert bench.tokens(falling()) == [45]
    bench.sampler.admit([bench.seated(1, {})])
    assert bench.sampler.features(np.array([1])).plain
    assert bench.tokens(falling()) == [0]


def test_all_seats_may_be_taken_in_one_step(device: torch.device) -> None:
    requests = [({"logit_bias": {10 + i: 100.0}}, [1]) for i in range(8)]
    assert Bench(device, *requests).tokens(falling(8)) == list(range(10, 18))


def test_every_token_forbidden_still_gives_a_token(device: torch.device) -> None:
    bench = Bench(device, ({"allowed_token_ids": [3], "logit_bias": {3: -100}, "bad_words_token_ids": [[3]]}, [1]))
    assert bench.tokens(falling()) == [0]


# -- features -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, set()),
        ({"temperature": 0.7}, set()),
        ({"temperature": 0.7, "top_k": VOCAB, "top_p": 1.0}, set()),
        ({"top_p": 0.5, "top_k": 3}, set()),  # greedy
        ({"temperature": 0.7, "top_p": 0.5}, {"filter"}),
        ({"temperature": 0.7, "top_k": 3}, {"filter"}),
        ({"temperature": 0.7, "min_p": 0.5}, {"filter"}),
        ({"presence_penalty": 1.0}, {"penalties"}),
        ({"frequency_penalty": -1.0}, {"penalties"}),
        ({"repetition_penalty": 1.1}, {"penalties"}),
        ({"logit_bias": {1: 2.0}}, {"lists"}),
        ({"allowed_token_ids": [1]}, {"lists"}),
        ({"bad_words_token_ids": [[1]]}, {"lists"}),
        ({"min_tokens": 3}, {"lists"}),
        ({"logprobs": 0}, {"logprobs"}),
    ],
    ids=str,
)
def test_features_say_what_the_rows_want(params: dict[str, Any], wanted: set[str]) -> None:
    bench = Bench(torch.device("cpu"), (params, [1]), ({}, [1]))
    features = bench.sampler.features(np.array([1, 2]))
    found = {name for name in ("filter", "penalties", "lists", "logprobs") if getattr(features, name)}
    assert found == wanted
    assert features.plain == (not wanted)
    assert bench.sampler.features(np.array([2])).plain


def test_a_row_samples_alike_with_and_without_neighbours_that_want_more(device: torch.device) -> None:
    logits = torch.randn(4, VOCAB)
    alone = Bench(device, ({"temperature": 1.0, "seed_value": 11}, [1, 2]))
    token = alone.tokens(logits[:1])
    crowd = [({"temperature": 1.0, "seed_value": 11}, [1, 2])]
    crowd += [({"temperature": 1.0, "top_p": 0.5}, [3]), ({"logprobs": 2, "presence_penalty": 1.0}, [4])]
    crowd += [({"logit_bias": {3: 1.0}, "temperature": 0.2}, [5])]
    assert Bench(device, *crowd).tokens(logits)[:1] == token


def test_slices_change_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, VOCAB)
    requests = [
        ({"temperature": 1.0, "presence_penalty": 1.0, "logprobs": 1}, [4, 5]),
        ({"temperature": 1.0, "logit_bias": {4: 3.0}, "logprobs": 4}, [4, 5]),
        ({"temperature": 1.0, "top_k": 4}, [4, 5]),
        ({"allowed_token_ids": [7, 9]}, [1]),
        ({"bad_words_token_ids": [[1, 2]], "logprobs": 0}, [3, 1]),
    ]
    whole = Bench(device, *requests).sample(logits)
    monkeypatch.setattr(module, "_SLICE_BYTES", 2 * 4 * VOCAB)
    sliced = Bench(device, *requests).sample(logits)
    assert torch.equal(whole.token_ids, sliced.token_ids)
    assert whole.logprobs is not None
    assert sliced.logprobs is not None
    for name in ("rows", "counts", "ranks"):
        assert torch.equal(getattr(whole.logprobs, name), getattr(sliced.logprobs, name))
    for i, count in enumerate(whole.logprobs.counts.tolist()):
        for name in ("token_ids", "logprobs"):
            ours, theirs = getattr(sliced.logprobs, name)[i, :count], getattr(whole.logprobs, name)[i, :count]
            torch.testing.assert_close(ours, theirs)


# -- masks --------------------------------------------------------------------------------------------------------


def masks(allowed: dict[int, set[int]]) -> TokenMasks:
    """What some rows may sample."""
    bits = np.zeros((len(allowed), -(-VOCAB // 32)), np.uint32)
    for line, tokens in zip(bits, allowed.values(), strict=True):
        for token in tokens:
            line[token // 32] |= np.uint32(1 << token % 32)
    return TokenMasks(0, np.array([*allowed], np.int32), bits.view(np.int32))


@pytest.mark.parametrize("slice_rows", [1, 2, 8])
def test_masks_come_before_all_other_wishes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, slice_rows: int
) -> None:
    monkeypatch.setattr(module, "_SLICE_BYTES", slice_rows * 4 * VOCAB)
    requests = [
        ({}, [1]),
        ({"allowed_token_ids": [3, 40, 50]}, [1]),
        ({"bad_words_token_ids": [[33]]}, [1]),
        ({"logit_bias": {7: 50.0, 45: 50.0}}, [1]),
        ({"logprobs": 2}, [1]),
        ({"min_tokens": 5, "stop_ids": [20]}, [1]),
    ]
    bench = Bench(device, *requests)
    found = bench.sample(falling(6), masks({1: {40, 50}, 2: {33, 34}, 3: {44, 45}, 4: {58, 59}, 5: {20, 21}}))
    assert found.token_ids.squeeze(1).tolist() == [0, 40, 34, 45, 58, 21]
    assert found.logprobs is not None
    assert found.logprobs.ranks.tolist() == [59]  # among the model's own logits
    assert found.logprobs.token_ids[0, :3].tolist() == [58, 0, 1]


def test_a_mask_that_allows_nothing_gives_token_0(device: torch.device) -> None:
    bench = Bench(device, ({}, [1]), ({"temperature": 1.0, "seed_value": 3}, [1]))
    assert bench.tokens(falling(2), masks({0: set(), 1: set()})) == [0, 0]


def test_sampling_under_a_mask_is_sampling_from_what_is_left(device: torch.device) -> None:
    """The same seed draws the same token as from logits that never had the others."""
    bench = Bench(device, *(({"temperature": 1.0, "seed_value": seed}, [1] * (seed + 1)) for seed in range(8)))
    logits, allowed = torch.randn(8, VOCAB), {row: {row, row + 9, row + 31, 59} for row in range(8)}
    left = torch.full_like(logits, -math.inf)
    for row, tokens in allowed.items():
        left[row, [*tokens]] = logits[row, [*tokens]]
    assert bench.tokens(logits, masks(allowed)) == bench.tokens(left)


# -- log-probabilities --------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own(device: torch.device) -> None:
    logits = torch.randn(4, VOCAB)
    best = logits[1].argsort(descending=True)
    requests = [
        ({"logprobs": 2, "logit_bias": {int(logits[0].argmin()): 100.0}}, [1]),
        ({"logprobs": 5, "presence_penalty": 2.0, "num_prompt": 0}, [int(best[0])] * 3),
        ({}, [1]),
        ({"logprobs": 0}, [1]),
    ]
    output = Bench(device, *requests).sample(logits)
    lines = output.logprobs
    assert lines is not None
    expected = torch.log_softmax(logits, -1)
    tokens = output.token_ids.squeeze(1).tolist()
    assert tokens[0] == int(logits[0].argmin())
    assert lines.rows.tolist() == [0, 1, 3]
    assert lines.counts.tolist() == [3, 6, 1]
    for line, row in enumerate([0, 1, 3]):
        order = expected[row].argsort(descending=True)
        ids = lines.token_ids[line].tolist()
        assert ids[0] == tokens[row]
        assert ids[1:6] == order[:5].tolist()
        torch.testing.assert_close(lines.logprobs[line].cpu(), expected[row][ids], rtol=1e-5, atol=1e-5)
        assert lines.ranks[line] == 1 + order.tolist().index(tokens[row])
    assert lines.ranks[0] == VOCAB


def test_logprobs_of_the_whole_vocabulary(device: torch.device) -> None:
    logits = torch.randn(1, VOCAB)
    lines = Bench(device, ({"logprobs": -1}, [1])).sample(logits).logprobs
    assert lines is not None
    assert lines.counts.tolist() == [1 + VOCAB]
    assert sorted(lines.token_ids[0, 1:].tolist()) == list(range(VOCAB))
    assert lines.logprobs[0, 1:].double().exp().sum().item() == pytest.approx(1)


def test_logprobs_are_never_nan(device: torch.device) -> None:
    logits = torch.randn(3, VOCAB)
    logits[0, 3] = math.nan
    logits[1] = -math.inf
    logits[2, 8] = math.inf
    lines = Bench(device, *([({"logprobs": 3}, [1])] * 3)).sample(logits).logprobs
    assert lines is not None
    assert not lines.logprobs.isnan().any()
    assert lines.token_ids[:, 0].tolist() == [int(logits[0].nan_to_num(-100).argmax()), 0, 8]


@pytest.mark.parametrize("k", [0, 3, -1])
def test_prompt_logprobs(device: torch.device, k: int) -> None:
    logits, next_ids = torch.randn(5, VOCAB), torch.randint(0, VOCAB, (5,), dtype=torch.int32)
    lines = prompt_logprobs(logits.to(device), next_ids.to(device), k, 6)
    width = VOCAB if k == -1 else k
    expected = torch.log_softmax(logits, -1)
    assert lines.rows.tolist() == [6] * 5
    assert lines.counts.tolist() == [1 + width] * 5
    for i, token in enumerate(next_ids.tolist()):
        torch.testing.assert_close(lines.logprobs[i].cpu(), expected[i][lines.token_ids[i].cpu().long()])
        assert lines.token_ids[i, 0] == token
        assert lines.token_ids[i, 1:].tolist() == expected[i].argsort(descending=True)[:width].tolist()
        assert lines.ranks[i] == 1 + (expected[i] > expected[i, token]).sum()


def test_concat_widens_narrow_parts() -> None:
    parts = [prompt_logprobs(torch.randn(2, VOCAB), torch.tensor([1, 2]), k, k) for k in (1, 4)]
    lines = LogprobTensors.concat(parts)
    assert lines.token_ids.shape == lines.logprobs.shape == (4, 5)
    assert lines.counts.tolist() == [2, 2, 5, 5]
    assert torch.equal(lines.token_ids[2:], parts[1].token_ids)
    assert torch.equal(lines.token_ids[:2, :2], parts[0].token_ids)
