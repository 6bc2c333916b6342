"""Every family against transformers: same checkpoint, same tokens, same logits, however the tokens are brought."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.effort import sampled
from tests.models import checkpoints
from tests.models.cases import CASES, USUAL
from tests.models.paged import PagedRows


@pytest.fixture(
    scope="module",
    params=sampled(list(CASES), lambda case: case.startswith(("llama", "mistral", "qwen")) or case in USUAL),
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    family, config = CASES[request.param]
    reference = checkpoints.make(family, **config)
    return reference, checkpoints.save(reference, tmp_path_factory.mktemp(request.param))


def expected(reference: Any, tokens: list[list[int]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [reference(torch.tensor([ids])).logits[0].float() for ids in tokens]


def random_tokens(seed: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, checkpoints.TINY["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def largest_error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    assert [a.shape for a in ours] == [b.shape for b in theirs]
    assert all(b.std() > 0.3 for b in theirs), "the reference says the same about every token"
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def test_prompts_in_one_go(pair: tuple[Any, Path]) -> None:
    reference, folder = pair
    tokens = random_tokens(0, [50, 1, 17, 33])
    rows = PagedRows(checkpoints.load(folder))
    order = [1, 0, 2, 3]  # one-token rows first
    ours = rows.step([row + 1 for row in order], [tokens[row] for row in order])
    theirs = expected(reference, tokens)
    assert largest_error(ours, [theirs[row] for row in order]) <= 1e-4


def test_prompts_in_chunks(pair: tuple[Any, Path]) -> None:
    reference, folder = pair
    tokens = random_tokens(1, [61, 40])
    rows = PagedRows(checkpoints.load(folder))
    parts: list[list[torch.Tensor]] = [[], []]
    bounds = [(0, 13, 14, 40, 61), (0, 5, 21, 22, 40)]
    for step in range(4):
        pieces = [tokens[row][bounds[row][step] : bounds[row][step + 1]] for row in range(2)]
        order = sorted(range(2), key=lambda row: len(pieces[row]) > 1)
        for row, logits in zip(order, rows.step([row + 1 for row in order], [pieces[r] for r in order]), strict=True):
            parts[row].append(logits)
    assert largest_error([torch.cat(part) for part in parts], expected(reference, tokens)) <= 1e-4


def test_token_by_token(pair: tuple[Any, Path]) -> None:
    """Three rows decode together: two of like length, one far behind."""
    reference, folder = pair
    tokens = random_tokens(2, [45, 43, 24])
    rows = PagedRows(checkpoints.load(folder))
    prompts = [21, 19, 0]
    parts = [[logits] for logits in rows.step([1, 2], [tokens[0][:21], tokens[1][:19]])] + [[]]
    for step in range(24):
        for row, logits in enumerate(rows.step([1, 2, 3], [[tokens[r][prompts[r] + step]] for r in range(3)])):
            parts[row].append(logits)
    assert largest_error([torch.cat(part) for part in parts], expected(reference, tokens)) <= 1e-4


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_no_worse_than_the_reference(pair: tuple[Any, Path], device: str, tmp_path: Path) -> None:
    """Both in bfloat16 against the reference in float32; prompt, then single tokens."""
    reference, folder = pair
    if getattr(reference.config, "num_local_experts", 0) or getattr(reference.config, "num_experts", 0):
        pytest.skip("rounding sends tokens to other experts")
    tokens = random_tokens(3, [40, 30])
    exact = expected(reference, tokens)
    theirs = expected(checkpoints.reload(reference, tmp_path, torch.bfloat16), tokens)
    rows = PagedRows(checkpoints.load(folder, torch.bfloat16, torch.device(device)), block_size=16)
    parts = [[logits] for logits in rows.step([1, 2], [ids[:20] for ids in tokens])]
    for step in range(20, 40):
        alive = [row for row in range(2) if step < len(tokens[row])]
        for row, logits in zip(
            alive, rows.step([row + 1 for row in alive], [[tokens[row][step]] for row in alive]), strict=True
        ):
            parts[row].append(logits)

    def error(logits: list[torch.Tensor]) -> float:
        """Root mean square, relative to that of the logits."""
        delta, size = torch.cat(logits) - torch.cat(exact), torch.cat(exact)
        return (delta.square().mean() / size.square().mean()).sqrt().item()

    assert error([torch.cat(part) for part in parts]) <= 1.25 * error(theirs)
