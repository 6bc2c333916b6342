"""Eager steps that are padded to round sizes give the same text (on a GPU they are; here the CPU is told to)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.worker import assembly as assembly_module
from quire.worker import batch as batch_module
from quire.worker.batch import BatchBuilder, round_size
from tests.e2e.conftest import Reference
from tests.e2e.test_greedy_equals_transformers import prompts, run
from tests.e2e.test_padded_steps import SlowAttention

TOKENS = 40


@pytest.mark.parametrize("options", [
    {"max_num_seqs": 10, "max_prefill_chunk": 32},
    {"max_num_batched_tokens": 70, "max_num_seqs": 18, "async_scheduling": True},
    {"preempt_every_step": True, "max_num_seqs": 5},
], ids=str)  # fmt: skip
def test_text_is_what_transformers_gives(
    tiny_qwen3: Path, reference: Reference, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    build = BatchBuilder.__init__

    def build_padding(self: BatchBuilder, *args: Any, pads: bool, **named: Any) -> None:
        assert not pads, "this is a CPU"
        build(self, *args, pads=True, **named)

    def noted(_: SlowAttention, inputs: Any) -> Any:
        seen.append((inputs.num_rows, inputs.num_tokens))
        return inputs

    monkeypatch.setattr(batch_module, "_EXACT_SIZES", 3)
    monkeypatch.setattr(batch_module, "SIZE_STEP", 8)
    monkeypatch.setattr(BatchBuilder, "__init__", torch.inference_mode()(build_padding))
    monkeypatch.setattr(SlowAttention, "plan", noted)
    monkeypatch.setattr(assembly_module, "select", lambda _name, spec, _platform: SlowAttention(spec))
    wanted = prompts(24)
    assert run(tiny_qwen3, wanted, TOKENS, **options) == [reference.greedy(p, TOKENS) for p in wanted]
    assert all(tokens <= 3 or tokens % 8 == 0 or tokens == options["max_num_seqs"] for _, tokens in seen)
    assert any(tokens == rows for rows, tokens in seen) or "preempt_every_step" in options
    assert any(tokens > rows for rows, tokens in seen)


def test_round_sizes() -> None:
    assert [round_size(n) for n in (1, 17, 128, 129, 192, 193, 8192)] == [1, 17, 128, 192, 192, 256, 8192]
