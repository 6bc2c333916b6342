"""Repetition, presence and frequency penalties, from a history that only the device has."""

from __future__ import annotations

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from quire.kernels.sampling.state import CHUNK
from tests.sampling.conftest import Backend
from tests.sampling.rows import columns, history


def by_definition(logits: torch.Tensor, tokens: list[int], num_prompt: int, row: dict[str, float]) -> torch.Tensor:
    logits = logits.clone()
    if tokens and "repetition_penalty" in row:
        ids = torch.tensor([tokens])
        logits = RepetitionPenaltyLogitsProcessor(row["repetition_penalty"])(ids, logits.unsqueeze(0))[0]
    output = tokens[num_prompt:]
    for token in set(output):
        logits[token] -= output.count(token) * row.get("frequency_penalty", 0) + row.get("presence_penalty", 0)
    return logits


def test_penalties_follow_their_definitions(backend: Backend) -> None:
    vocab = CHUNK + 60
    tokens = [
        [5, 5, 7, 8, 5, 7, vocab - 1, 0, 0, 0],
        [1, 2, 3],
        [9],
        torch.randint(0, 50, (2100,)).tolist(),
        [4, 4, 4, 4],
        [6, 6, 6],
    ]
    rows = [
        {"num_prompt": 4, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.4},
        {"num_prompt": 3, "repetition_penalty": 0.8},
        {"num_prompt": 1, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"num_prompt": 1050, "frequency_penalty": 0.01},
        {"num_prompt": 2},
        {"num_prompt": 0, "presence_penalty": -2.0, "repetition_penalty": 2.0},
    ]
    logits = torch.randn(len(rows), vocab)
    logits[5, 6] = -torch.inf
    past, seats, lengths = history(tokens)
    got = backend.penalize(logits, columns(rows), seats, lengths, past)
    for i, row in enumerate(rows):
        expected = by_definition(logits[i], tokens[i], int(row["num_prompt"]), row)
        torch.testing.assert_close(got[i], expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(got[4], logits[4]), "a row without penalties keeps its very bits"


def test_padding_rows_are_left_alone(backend: Backend) -> None:
    logits = torch.randn(2, 64)
    past, seats, lengths = history([[1, 2], [3, 4]])
    seats[1] = 0
    got = backend.penalize(logits, columns([{"presence_penalty": 1.0}] * 2), seats, lengths, past)
    assert torch.equal(got[1], logits[1])
    assert not torch.equal(got[0], logits[0])
