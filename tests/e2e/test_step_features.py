"""A feature of single steps, added from outside: a struct of the plan, a planner function, and who acts on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.foundation.errors import ConfigError
from quire.models.base import GivenEmbeddings
from quire.scheduling import build
from quire.scheduling.build import PlanBuilder
from quire.types.plan import StepPlan
from quire.worker.features.base import STEP_FEATURES, FeatureSetup, StepFeature, StepFeatures
from quire.worker.sampling.logprobs import LogprobTensors
from tests.e2e.conftest import Reference

PROMPTS = [[11, 12, 13], [40] * 30, [7, 9]]
OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 128, "skip_tokenizer_init": True}


class Shift(msgspec.Struct, frozen=True, tag="shift"):
    """Catch-up rows whose prompt tokens are read as if their ids were `by` more."""

    rows: np.ndarray
    by: int


def plan_shift(plan: PlanBuilder) -> Any:
    rows = [row for row, chunk in enumerate(plan.chunks, len(plan.decodes)) if chunk.start < chunk.request.num_prompt]
    return Shift(np.array(rows, np.int32), 1) if rows else None


class Shifter(StepFeature):
    made = 0
    seen = 0

    def __init__(self, setup: FeatureSetup) -> None:
        super().__init__(setup)
        Shifter.made += 1

    def before_forward(self, plan: StepPlan, wanted: Shift) -> GivenEmbeddings:
        starts = np.cumsum(plan.num_tokens) - plan.num_tokens
        places = [range(starts[row], starts[row] + plan.num_tokens[row]) for row in wanted.rows.tolist()]
        tokens = torch.tensor([place for span in places for place in span])
        ids = torch.from_numpy(plan.token_ids.copy())[tokens - plan.num_decodes]
        return GivenEmbeddings(tokens, self.setup.model.embed_tokens(ids + wanted.by))

    def after_forward(
        self, plan: StepPlan, wanted: Shift, hidden: torch.Tensor, input_ids: torch.Tensor
    ) -> LogprobTensors | None:
        assert hidden.shape[1] == self.setup.model.hidden
        assert len(hidden) == len(input_ids) >= plan.num_tokens.sum()
        assert torch.isfinite(hidden).all()
        Shifter.seen += len(wanted.rows)
        return None


@pytest.fixture
def shift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STEP_FEATURES, "_targets", dict(STEP_FEATURES._targets))
    STEP_FEATURES.register("shift", Shifter)
    monkeypatch.setattr(build, "ATTACHMENTS", [*build.ATTACHMENTS, plan_shift])
    Shifter.made = Shifter.seen = 0


@pytest.mark.usefixtures("shift")
def test_it_acts_on_its_rows_and_beside_the_others(
    tiny_qwen3: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[StepPlan] = []
    of = StepFeatures.of
    monkeypatch.setattr(StepFeatures, "of", lambda self, plan: asked.append(plan) or of(self, plan))
    params = [SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=n, detokenize=False) for n in (None, 0, 2)]
    with LLM(str(tiny_qwen3), **OPTIONS, max_prefill_chunk=16) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == reference.greedy([token + 1 for token in prompt], 8)
    assert [o.prompt_logprobs is not None and len(o.prompt_logprobs) for o in outputs] == [False, 30, 2]
    assert Shifter.made == 1
    assert Shifter.seen == 4  # one of the prompts came in two chunks
    assert all(plan.num_decodes < plan.num_rows for plan in asked), "decode steps know nothing of it"


def test_nobody_is_made_who_is_not_asked_for(tiny_qwen3: Path) -> None:
    with LLM(str(tiny_qwen3), **OPTIONS) as llm:
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
        made = llm._client._core._executor._worker.runner.mixed._features._made  # type: ignore[attr-defined]
        assert made == {}
        wanted = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], wanted, use_tqdm=False)
        assert list(made) == ["prompt_logprobs"]


def test_what_is_no_feature_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'x' is no step feature: .* lacks before_forward, after_forward"):
        STEP_FEATURES.register("x", dict)
    assert "x" not in STEP_FEATURES
