"""Steps with drafts in the layout of their graphs give the same answers: on the CPU, each "graph" the Python that would
be captured; and on a GPU."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.attention.base import ALIKE, AttentionInputs, LayerCache, PerHead
from quire.kernels.attention import paged as paged_attention
from quire.types.plan import StepPlan
from quire.worker import assembly as assembly_module
from quire.worker.assembly import Assembly
from quire.worker.graphs import DecodeGraphs, DecodeSize, DraftedGraphs, DraftedSize, StepGraphs, drafted_sizes
from quire.worker.mixed_graphs import MixedSize
from quire.worker.runner import Runner
from tests.e2e.test_drafts import ALWAYS, FEATURES, requests, run, same
from tests.e2e.test_drafts import OPTIONS as PLAIN
from tests.e2e.test_padded_steps import SlowAttention, steps  # noqa: F401 (a fixture)

# Drafts are made, and never pay.
OPTIONS = {**PLAIN, "speculative_config": {**ALWAYS["speculative_config"], "policy": "auto"}}


class SlowDraftedAttention(SlowAttention):
    prefix_support = False

    def run(
        self, q: torch.Tensor, cache: LayerCache, plan: AttentionInputs, scale: float, heads: PerHead = ALIKE
    ) -> torch.Tensor:
        if plan.first_lens is None:
            return super().run(q, cache, plan, scale, heads)
        count, kv_heads, dim = q.shape[1], cache.k.shape[1], q.shape[2]
        schedule = paged_attention.decode_schedule(
            plan.seats, plan.seq_lens, count, kv_heads, dim, q.dtype, self.scores,
            drafted=(plan.num_queries, plan.first_lens),
        )  # fmt: skip
        return paged_attention.decode(
            q, cache.k, cache.v, plan.block_table, schedule, scale, torch.empty(0), None, heads
        )


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch, steps: list[tuple[StepPlan, MixedSize | None]]) -> list[Any]:  # noqa: F811, ARG001
    """Sizes of the decode steps that ran as graphs."""
    seen: list[Any] = []
    build = Assembly.runner

    def filled(graphs: StepGraphs[Any], forward: Any, tail: Any) -> Any:
        def noted(size: Any) -> None:
            seen.append(size)
            forward(size, None)

        for size in graphs.sizes:
            forward(size, 1)  # as a capture does: whatever it reads then must be harmless
            graphs._forwards[size] = SimpleNamespace(replay=partial(noted, size))
            for filtered in (False, True):
                tail(size, filtered)
                graphs._tails[size.rows, filtered] = SimpleNamespace(replay=partial(tail, size, filtered))
        return graphs

    def build_with_graphs(self: Assembly, num_blocks: int, max_model_len: int, **options: Any) -> Runner:
        runner = build(self, num_blocks, max_model_len, **options)
        parts, drafted = runner.parts, runner.drafted
        assert parts.drafts is not None
        assert drafted is not None
        parts.logits = torch.full((len(parts.logits) + parts.drafts.max_tokens, parts.sampler.vocab_size), torch.nan)
        decode = DecodeGraphs([DecodeSize(rows, shares_prefix=False) for rows in (12, 7, 3, 1)])
        runner.decode.graphs = filled(decode, runner.decode.forward, runner.decode.tail)
        graphs = DraftedGraphs(drafted_sizes(parts.drafts.max_rows, parts.drafts.width))
        drafted.graphs = filled(graphs, drafted.forward, drafted.tail)
        return runner

    monkeypatch.setattr(Assembly, "runner", torch.inference_mode()(build_with_graphs))
    monkeypatch.setattr(StepGraphs, "seconds", lambda _, size: 1.0 + 99 * isinstance(size, DraftedSize))
    monkeypatch.setattr(assembly_module, "select", lambda _name, spec, _platform: SlowDraftedAttention(spec))
    return seen


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path) -> list[Any]:
    return run(tiny_qwen3)[0]


@pytest.mark.parametrize("policy", ["always", "auto"])
def test_answers_are_the_same(tiny_qwen3: Path, expected: list[Any], replayed: list[Any], policy: str) -> None:
    wanted = {"speculative_config": {**ALWAYS["speculative_config"], "policy": policy}}
    answers, _ = run(tiny_qwen3, **wanted, async_scheduling=True, max_num_batched_tokens=64)
    for (_, params), answer, plain in zip(requests(), answers, expected, strict=True):
        assert same(answer, plain), params
    drafted = {size for size in replayed if isinstance(size, DraftedSize)}
    assert len(drafted) > 2 if policy == "always" else len(drafted) < len(set(replayed))


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_what_needs_no_more_than_the_tails(tiny_qwen3: Path, replayed: list[Any], temperature: float) -> None:
    """Greedy and plain sampling, which never leave the graphs, top-k in its own."""
    rng = random.Random(8)
    prompts = [{"prompt_token_ids": [rng.choice((3, 5, 8)) for _ in range(rng.randint(4, 30))]} for _ in range(10)]
    params = [
        SamplingParams(temperature=temperature, top_k=seed % 3, seed=seed, max_tokens=40, detokenize=False)
        for seed in range(10)
    ]
    answers = []
    for drafts in (OPTIONS["speculative_config"], ALWAYS["speculative_config"]):
        with LLM(str(tiny_qwen3), **{**OPTIONS, "speculative_config": drafts}, async_scheduling=True) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            accepted = llm.call("stats").get("num_accepted_tokens", 0)
    assert answers[0] == answers[1]
    assert accepted > 20
    assert {type(size) for size in replayed} == {DecodeSize, DraftedSize}


GPU: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "few blocks, chunks": {"num_gpu_blocks_override": 30, "max_prefill_chunk": 16},
    "auto": {"policy": "auto"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU)
def test_answers_are_the_same_on_a_gpu(tiny_qwen3: Path, case: str) -> None:
    """Up to the rounding of logits, which may turn a few tokens in all: most answers are equal to the last token."""
    options = {"device": "cuda", "dtype": "float32", "gpu_memory_utilization": 0.2, **GPU[case]}
    policy = options.pop("policy", "always")
    plain, _ = run(tiny_qwen3, **options)
    wanted = {"speculative_config": {**ALWAYS["speculative_config"], "policy": policy}}
    answers, counted = run(tiny_qwen3, **options, **wanted)
    differing = [i for i, (one, other) in enumerate(zip(answers, plain, strict=True)) if not same(one, other)]
    assert len(differing) <= 2, [requests()[i][1] for i in differing]
    if policy == "always":
        assert counted["vllm:spec_decode_num_accepted_tokens"] > 100
    assert len(plain) > len(FEATURES)


def test_sizes_fill_the_tiles_of_products() -> None:
    assert [size.rows for size in drafted_sizes(204, 5)] == [204, 153, 102, 76, 51, 38, 25, 12, 6, 3, 1]
    assert [size.rows for size in drafted_sizes(1, 16)] == [1]
    assert drafted_sizes(0, 16) == []
    graphs = DraftedGraphs(drafted_sizes(12, 5))
    found = [graphs.size_for(rows) for rows in (1, 2, 4, 12, 13)]
    assert [size and size.rows for size in found] == [1, 3, 6, 12, None]
