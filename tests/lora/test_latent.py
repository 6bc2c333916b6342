"""Adapters of what makes keys and values of latent rows: of several in one batch each computes what merged weights do,
whichever way its prompt is attended for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest
from quire.attention import expanded
from tests.lora.adapters import PROMPT
from tests.lora.test_parity import scores
from tests.lora.test_routers import ASK, OPTIONS, made
from tests.models import checkpoints, sparse_checkpoints

NAMES = {"self_attn.kv_b_proj": "self_attn.kv_b_proj"}


@pytest.mark.parametrize(
    ("expands", "options"),
    [
        (True, {}),
        (False, {"max_prefill_chunk": 5}),
        (True, {"max_prefill_chunk": 5, "quantization": "fp8"}),
        pytest.param(False, {"tensor_parallel_size": 2}, marks=pytest.mark.long),
    ],
)
def test_several_in_a_batch(
    expands: bool, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded, "pays", lambda *_: expands)
    model = sparse_checkpoints.make("deepseek2")
    base = checkpoints.save(model, tmp_path / "base")
    requests: list[LoRARequest | None] = [None]
    folders = [base]
    for number, alpha in enumerate((3, 9), 1):
        adapter, merged = made(model, NAMES, tmp_path / f"a{number}", lora_alpha=alpha)
        requests.append(LoRARequest(f"a{number}", number, str(adapter)))
        folders.append(checkpoints.save(merged, tmp_path / f"merged{number}"))
    requests, folders = [*requests, *reversed(requests)], [*folders, *reversed(folders)]
    prompts = [[*PROMPT[i:], *PROMPT[:i]] for i in range(len(requests))]
    with LLM(str(base), **OPTIONS, **options, enable_lora=True, max_loras=2) as llm:
        found = llm.generate(prompts, ASK, lora_request=requests, use_tqdm=False)
    for folder in set(folders):
        own = [i for i, other in enumerate(folders) if other == folder]
        with LLM(str(folder), **OPTIONS, **options) as llm:
            wanted = llm.generate([prompts[i] for i in own], ASK, use_tqdm=False)
        for i, other in zip(own, wanted, strict=True):
            assert found[i].outputs[0].token_ids == other.outputs[0].token_ids
            torch.testing.assert_close(scores(found[i]), scores(other), atol=1e-4, rtol=0)
