"""Steps in the layout of a graph give the same text: on the CPU, each "graph" the Python that would be captured."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.attention.base import ALIKE, AttentionInputs, AttentionSpec, LayerCache, PerHead
from quire.engine import core
from quire.kernels.attention.paged import attention_reference
from quire.scheduling.prefixes import SharingThresholds
from quire.scheduling.scheduler import Scheduler
from quire.types.plan import StepPlan
from quire.worker import assembly as assembly_module
from quire.worker.assembly import Assembly
from quire.worker.mixed_graphs import MixedGraphs, MixedSize, mixed_sizes, with_prefixes
from quire.worker.padded import PaddedSteps
from quire.worker.runner import Runner
from tests.attention.prefix_reference import attend_by_prefix
from tests.e2e.conftest import Reference
from tests.e2e.test_greedy_equals_transformers import prompts, run
from tests.e2e.test_shared_prefixes import family
from tests.e2e.test_windows import MODELS, Model, check, engine
from tests.e2e.test_windows import prompts as window_prompts

TOKENS = 40


class SlowAttention:
    """Reads its rows on the device only, as a captured kernel must; what no row owns comes out as NaN."""

    name = "slow"
    reads_host = False
    graph_support = True
    prefix_support = True
    prompt_wave = 0

    def __init__(self, spec: AttentionSpec) -> None:
        self.scores = spec.scores

    def plan(self, inputs: AttentionInputs) -> AttentionInputs:
        return inputs

    def run(
        self, q: torch.Tensor, cache: LayerCache, plan: AttentionInputs, scale: float, heads: PerHead = ALIKE
    ) -> torch.Tensor:
        out = torch.full((len(q), q.shape[1] * q.shape[2]), torch.nan, dtype=q.dtype)
        bounds = plan.query_start.tolist()
        rows = [i for i in range(plan.num_rows) if bounds[i] < bounds[i + 1]]
        for row in rows:
            part = slice(bounds[row], bounds[row + 1])
            one = slice(row, row + 1)
            starts = torch.tensor([0, part.stop - part.start])
            out[part] = attention_reference(
                q[part], cache.k, cache.v, plan.seats[one], plan.block_table, starts, plan.seq_lens[one], 1, scale,
                self.scores, heads,
            )  # fmt: skip
        if plan.prefix is not None:
            attend_by_prefix(q, cache, plan, plan.prefix, scale, out)
        return out


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepPlan, MixedSize | None]]:
    """Every step with prompt chunks that runs, and the size it was padded to."""
    seen: list[tuple[StepPlan, MixedSize | None]] = []
    build = Assembly.runner
    monkeypatch.setattr("quire.worker.graphs._captured", lambda body, _: SimpleNamespace(replay=body))
    monkeypatch.setattr("quire.worker.graphs._driver_bytes", lambda: 0)

    def build_padded(self: Assembly, num_blocks: int, max_model_len: int, **options: Any) -> Runner:
        runner = build(self, num_blocks, max_model_len, **options)
        sizes = mixed_sizes(self._resolved.max_num_seqs, self._resolved.max_num_batched_tokens, 1000, 2)
        sizes = with_prefixes(sizes)
        group = self._model.num_heads // self._pages.groups[0].num_kv_heads
        parts, mixed = runner.parts, runner.mixed
        parts.groups.reserve(max(size.tokens for size in sizes))
        mixed._padded = PaddedSteps(parts.seats, sizes, group, max_model_len, self._device)
        parts.logits = torch.full((max(s.rows for s in sizes), parts.sampler.vocab_size), torch.nan)
        graphs = MixedGraphs(sizes)
        graphs.prepare(mixed.forward, mixed.tail, None)  # whatever it reads then must be harmless
        graphs.capture(graphs.wanted_early(), mixed.forward, mixed.tail)  # others with their first step
        mixed.graphs = graphs
        size_for = mixed.size_for

        def noted(plan: StepPlan, *about: Any) -> MixedSize | None:
            seen.append((plan, size_for(plan, *about)))
            return seen[-1][1]

        mixed.size_for = noted
        return runner

    monkeypatch.setattr(Assembly, "runner", torch.inference_mode()(build_padded))
    monkeypatch.setattr(assembly_module, "select", lambda _name, spec, _platform: SlowAttention(spec))
    return seen


CASES: dict[str, dict[str, Any]] = {
    "few seats": {"max_num_seqs": 10, "max_prefill_chunk": 32},
    "chunks of 16": {"max_prefill_chunk": 16, "enable_prefix_caching": False},
    "a small token budget, depth 2": {"max_num_batched_tokens": 70, "max_num_seqs": 18, "async_scheduling": True},
    "a preemption at every step": {"preempt_every_step": True, "max_num_seqs": 5},
}


@pytest.mark.parametrize("case", CASES)
def test_text_is_what_transformers_gives(
    tiny_qwen3: Path, reference: Reference, case: str, steps: list[tuple[StepPlan, MixedSize | None]]
) -> None:
    wanted = prompts(24)
    expected = [reference.greedy(p, TOKENS) for p in wanted]
    assert run(tiny_qwen3, wanted, TOKENS, **CASES[case]) == expected
    padded = [(plan, size) for plan, size in steps if size]
    assert len(padded) >= len(steps) / 2
    assert any(plan.num_decodes not in (0, size.decodes) for plan, size in padded)


@pytest.mark.parametrize("name", ["qwen3: five to one", "mistral: all"])
def test_layers_with_windows(name: str, tmp_path: Path, steps: list[tuple[StepPlan, MixedSize | None]]) -> None:
    """Every group's slots and plan come from the rows that a graph sees."""
    model = Model(tmp_path, *MODELS[name])
    with engine(model, max_num_seqs=10, max_prefill_chunk=32, async_scheduling=True) as llm:
        for _ in range(2):
            check(model, llm, window_prompts())
    padded = [(plan, size) for plan, size in steps if size]
    assert any(plan.num_decodes not in (0, size.decodes) for plan, size in padded)
    steps.clear()


def test_rows_that_begin_alike(
    tiny_qwen3: Path,
    reference: Reference,
    steps: list[tuple[StepPlan, MixedSize | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "Scheduler", partial(Scheduler, sharing_thresholds=SharingThresholds(1, 1, 1)))
    wanted = family(5, stems=3, count=24)
    expected = [reference.greedy(p, TOKENS) for p in wanted]
    options = {"max_num_seqs": 10, "max_num_batched_tokens": 128, "max_prefill_chunk": 16, "async_scheduling": True}
    assert run(tiny_qwen3, wanted, TOKENS, **options) == expected
    sharing = [plan for plan, size in steps if size and size.shares_prefix]
    assert len(sharing) > 10
    assert len({plan.num_decodes for plan in sharing}) > 3


def test_sizes_for_prefixes_are_few_and_hold_the_largest_step() -> None:
    sizes = mixed_sizes(1024, 16384, 600_000_000, 28)
    sharing = [size for size in with_prefixes(sizes) if size.shares_prefix]
    assert 0 < len(sharing) < len(sizes) / 2
    assert max(size.tokens for size in sharing) == max(size.tokens for size in sizes)
    assert max(size.decodes for size in sharing) == max(size.decodes for size in sizes)
    assert all(size.decodes and size.shares_prefix for size in sharing)


def test_rare_wishes_beside_plain_rows(tiny_qwen3: Path, steps: list[tuple[StepPlan, MixedSize | None]]) -> None:
    """Log-probabilities, penalties, several answers, a scored prompt: the same with and without padded steps."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "n": 3, "logprobs": 2},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 4},
        {"temperature": 0, "prompt_logprobs": 1},
    ]
    wanted = [{"prompt_token_ids": p} for p in prompts(20, seed=9)]
    params = [SamplingParams(seed=i, max_tokens=20, detokenize=False, **kinds[i % 5]) for i in range(20)]
    answers = []
    for options in ({}, {"max_num_batched_tokens": 64}):  # the second: many small steps
        with LLM(
            str(tiny_qwen3), device="cpu", num_threads=1, max_model_len=320, skip_tokenizer_init=True, **options
        ) as llm:
            outputs = llm.generate(wanted, params, use_tqdm=False)
        answers.append(
            [
                [(c.token_ids, [sorted(d) for d in c.logprobs] if c.logprobs else None) for c in o.outputs]
                for o in outputs
            ]
        )
    assert answers[0] == answers[1]
    assert any(size for _, size in steps)
    assert all(size is None for plan, size in steps if plan.attachments)
    steps.clear()


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1024, 16384), (256, 4096), (64, 512), (3, 100), (1, 64)])
def test_sizes_hold_every_small_step(max_rows: int, max_tokens: int) -> None:
    """Whatever the mix, a size that is found has room for it and wastes no more than the ladder's steps."""
    graphs = MixedGraphs(mixed_sizes(max_rows, max_tokens, 600_000_000, 28))
    nothing = torch.zeros(0).numpy()
    for decodes in {0, 1, 15, 16, 17, 47, 100, max_rows - 1} & set(range(max_rows)):
        for prompt_tokens in (1, 30, 120, 500, 1000, 1900):
            if prompt_tokens + decodes > max_tokens:
                continue
            plan = StepPlan(
                step=0, admits=[], seats=torch.arange(decodes + 1).numpy(), num_tokens=nothing, num_decodes=decodes,
                token_ids=torch.zeros(prompt_tokens).numpy(), samples=nothing, blocks=[], max_seq_len=1,
            )  # fmt: skip
            size = graphs.size_for(plan, False)
            if size is None:
                assert decodes > 496 or decodes + prompt_tokens > 1024
            else:
                assert size.decodes >= decodes
                assert size.tokens - size.decodes >= prompt_tokens
                assert size.tokens <= max(128, 3 * (decodes + prompt_tokens))


def test_large_models_need_few_sizes() -> None:
    for layers in (8, 32):
        assert max(size.tokens for size in mixed_sizes(1024, 16384, 8_000_000_000, layers)) == 1024
    assert max(size.tokens for size in mixed_sizes(1024, 16384, 70_000_000_000, 80)) == 256
    assert max(size.tokens for size in mixed_sizes(1024, 16384, 17_500_000_000, 80)) == 1024  # a rank's of four
