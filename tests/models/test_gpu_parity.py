"""Every family on a GPU in bfloat16, against transformers in float32 and against its own bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import checkpoints
from tests.models.paged import PagedRows
from tests.models.test_parity import CASES, random_tokens

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 97}


def relative_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of the exact logits."""
    return ((logits - exact).square().mean() / exact.square().mean()).sqrt().item()


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_logits(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    if "layer_types" in config:
        config = {**config, "layer_types": config["layer_types"][:2]}
    reference = checkpoints.make(family, **{**SIZES, **config})
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(0.5)  # wider layers than the other tests': keep the outputs at the same size
    folder = checkpoints.save(reference.to(torch.bfloat16), tmp_path)  # the weights are equal, the arithmetic is not
    tokens = random_tokens(5, [90, 61])
    device = torch.device("cuda")

    def of_transformers(dtype: torch.dtype) -> torch.Tensor:
        model = type(reference).from_pretrained(folder, dtype=dtype).to(device).eval()
        with torch.inference_mode():
            return torch.cat([model(torch.tensor([ids], device=device)).logits[0].float().cpu() for ids in tokens])

    exact, theirs = of_transformers(torch.float32), of_transformers(torch.bfloat16)
    rows = PagedRows(checkpoints.load(folder, torch.bfloat16, device), block_size=16)
    parts = [[logits] for logits in rows.step([1, 2], [ids[:40] for ids in tokens])]
    for step in range(40, 90):
        alive = [row for row in range(2) if step < len(tokens[row])]
        stepped = rows.step([row + 1 for row in alive], [[tokens[row][step]] for row in alive])
        for row, logits in zip(alive, stepped, strict=True):
            parts[row].append(logits)
    error = relative_error(torch.cat([torch.cat(part) for part in parts]), exact)
    assert error <= 2e-2
    assert error <= 1.1 * relative_error(theirs, exact), "worse than transformers' own bfloat16"
