"""Steps that nobody asked for, before the first that somebody did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.worker.trial_steps import ALL_FEATURES, run_picky, spread


@pytest.mark.parametrize(
    ("tokens", "rows", "most", "counts"),
    [(10, 4, 99, [3, 3, 2, 2]), (10, 4, 2, [2, 2, 2, 2]), (8192, 2, 512, [512, 512]), (3, 3, 1, [1, 1, 1])],
)
def test_no_row_is_longer_than_its_table(tokens: int, rows: int, most: int, counts: list[int]) -> None:
    found = spread(tokens, rows, most)
    assert found.tolist() == counts
    assert found.dtype == np.int32


@pytest.mark.parametrize("seats", [1, 2])
def test_a_step_with_everything_has_no_more_rows_than_seats(seats: int) -> None:
    with LLM(device="cpu", dtype="float32", max_num_seqs=seats) as llm:
        worker: Any = llm._client._core._executor._worker  # type: ignore[attr-defined]
        result = run_picky(worker.runner, ALL_FEATURES, 512, seats).result()
        assert len(result.tokens) == seats
        assert result.tokens[0] in (0, 1)  # what ALL_FEATURES allow


def test_steps_one_after_the_other_begin_anew() -> None:
    """Each fills its seats up to the end of their block tables; torch's own kernels fail if one goes on beyond it."""
    options: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 128, "max_model_len": 61, "block_size": 16}
    with LLM(device="cpu", dtype="float32", attention_backend="sdpa", **options) as llm:
        worker: Any = llm._client._core._executor._worker  # type: ignore[attr-defined]
        for rows in (None, 1, 1):
            worker._try(worker.runner, 128, rows).result()
            assert worker.runner.parts.seats.num_computed_np.max() <= 61
            assert worker.runner.parts.seats.state.num_computed.max() <= 61


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_one_seat_on_a_gpu() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(device="cuda", max_num_seqs=1, gpu_memory_utilization=0.3) as llm:
        assert len(llm.generate(["one", "two"], params, use_tqdm=False)) == 2
