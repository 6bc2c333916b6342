"""Columns, histories and textbook definitions for the tests."""

from __future__ import annotations

import math

import torch

from quire.kernels.sampling.sampling import Column, History, seed_key


def columns(rows: list[dict[str, float]]) -> torch.Tensor:
    """One seat a row from seat 1 on; names as in SamplingParams, plus num_prompt. Default: temperature 1, seed 0."""
    matrix = torch.zeros(len(rows) + 1, len(Column), dtype=torch.int32)
    floats = matrix.view(torch.float32)
    for seat, row in enumerate(rows, start=1):
        temperature, min_p = row.get("temperature", 1.0), row.get("min_p", 0.0)
        floats[seat, Column.INV_TEMPERATURE] = 1 / temperature if temperature else 0
        matrix[seat, Column.TOP_K] = int(row.get("top_k", 0))
        floats[seat, Column.TOP_P] = row.get("top_p", 1.0)
        floats[seat, Column.MIN_P_CUT] = temperature * math.log(min_p) if min_p else -math.inf
        matrix[seat, Column.NUM_PROMPT] = int(row.get("num_prompt", 0))
        matrix[seat, Column.MIN_TOKENS] = int(row.get("min_tokens", 0))
        floats[seat, Column.REPETITION] = row.get("repetition_penalty", 1.0)
        floats[seat, Column.PRESENCE] = row.get("presence_penalty", 0.0)
        floats[seat, Column.FREQUENCY] = row.get("frequency_penalty", 0.0)
        matrix[seat, Column.KEY_LOW], matrix[seat, Column.KEY_HIGH] = seed_key(int(row.get("seed", 0)))
    return matrix


def history(tokens: list[list[int]], block_size: int = 4) -> tuple[History, torch.Tensor, torch.Tensor]:
    """A paged history with scattered blocks, and the seats (1 ...) and lengths of its rows."""
    blocks = [-(-len(row) // block_size) for row in tokens]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1)) + 1
    table = torch.zeros(len(tokens) + 1, max(blocks, default=0) + 1, dtype=torch.int32)
    slots = torch.full(((sum(blocks) + 1) * block_size,), -1, dtype=torch.int32)
    free = iter(order.tolist())
    for seat, row in enumerate(tokens, start=1):
        for position, token in enumerate(row):
            if position % block_size == 0:
                table[seat, position // block_size] = next(free)
            slots[int(table[seat, position // block_size]) * block_size + position % block_size] = token
    seats = torch.arange(1, len(tokens) + 1, dtype=torch.int32)
    return History(slots, table, block_size), seats, torch.tensor([len(row) for row in tokens], dtype=torch.int32)


def softmax(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return torch.softmax(logits.double() / temperature, -1)


def filtered_softmax(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution to sample from, by sorting: [vocab] float64. Tied tokens share their fate."""
    scaled = logits.double() / temperature
    scaled[softmax(scaled) < min_p * softmax(scaled).max()] = -math.inf
    if 0 < top_k < len(scaled):
        scaled[scaled < scaled.topk(top_k).values[-1]] = -math.inf
    if top_p < 1:
        p = softmax(scaled)
        above = torch.stack([p[scaled > value].sum() for value in scaled])
        scaled[above >= top_p] = -math.inf
    return softmax(scaled)


def chi_square_limit(degrees: int) -> float:
    """A value that chi-square exceeds once in about 10**5 (Wilson-Hilferty)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.27 * math.sqrt(spread)) ** 3
