"""Every family on a GPU in bfloat16, against transformers in float32 and against its own bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import checkpoints
from tests.models.cases import CASES
from tests.models.paged import PagedRows
from tests.models.test_parity import random_tokens

SIZES: dict[str, Any] = {"intermediate_size": 512, "num_hidden_layers": 2}


def widened(config: dict[str, Any]) -> dict[str, Any]:
    """The same with heads of 64, as wide as kernels are made for."""
    heads = config.get("num_attention_heads", 4)
    hidden = 64 * (4 if heads is ... else heads)
    wide = {**SIZES, **config, "hidden_size": hidden}
    if "head_dim" in config:
        wide["head_dim"] = 64
    expanded = config.get("expand", config.get("mamba_expand", 2)) * hidden
    for key in (
        "num_heads",
        "mamba_n_heads",
        "n_mamba_heads",
    ):  # of states: together they are as wide as the layer is inside
        if key in config:
            wide[key] = expanded // 64
    if config.get("mamba_d_ssm") is not None:
        wide["mamba_d_ssm"] = expanded
    if config.get("attention_multiplier") == 12**-0.5:  # the usual one of narrow heads
        wide["attention_multiplier"] = 64**-0.5
    rope = config.get("rope_parameters", {})
    for key in ("short_factor", "long_factor"):
        if key in rope:
            wide["rope_parameters"] = rope = {**rope, key: [1.0 + column / 5 for column in range(32)]}
    for key in ("layer_types", "no_rope_layers"):
        if key in config and config[key] is not None:
            wide[key] = config[key][: wide["num_hidden_layers"]]
    return wide


def relative_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of the exact logits."""
    return ((logits - exact).square().mean() / exact.square().mean()).sqrt().item()


def bfloat16_errors(case: str, folder: Path, device: torch.device) -> tuple[float, float]:
    """Ours and transformers', of two prompts and of tokens that follow one by one."""
    family, config = CASES[case]
    reference = checkpoints.make(family, **widened(config))
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(0.5)  # wider layers than the other tests': keep the outputs at the same size
    reference.to(torch.bfloat16)  # the weights are equal, the arithmetic is not
    checkpoints.save(reference, folder)
    tokens = random_tokens(5, [90, 61])

    def of_transformers(dtype: torch.dtype) -> torch.Tensor:
        model = checkpoints.reload(reference, folder / "theirs", dtype).to(device).eval()
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
    ours = torch.cat([torch.cat(part) for part in parts])
    return relative_error(ours, exact), relative_error(theirs, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_logits(case: str, tmp_path: Path) -> None:
    ours, theirs = bfloat16_errors(case, tmp_path, torch.device("cuda"))
    assert ours <= 1.5 * theirs, "worse than transformers' own bfloat16"
