"""Models whose layers keep a state, out of the prefix cache: what is told of a request is the same with a hit as
without, whoever computes beside it and whoever has to make room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.effort import sampled
from tests.models import checkpoints
from tests.models.cases import CASES, HYBRIDS
from tests.models.test_families import VOCAB, table
from tests.models.test_parity import random_tokens

STEPS = 8
USUAL: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True,
    "max_logprobs": VOCAB,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, detokenize=False, logprobs=VOCAB)
WAYS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks of 24, depth 2": {"max_prefill_chunk": 24, "async_scheduling": True},
    "preempted in every step": {"max_prefill_chunk": 24, "preempt_every_step": True},
}

# A page of the other's holds more tokens than these prompts have.
SHARING = [case for case in HYBRIDS if case != "kimi_linear-groups"]


def branching() -> list[list[int]]:
    """Beginnings of 100 tokens that part at several places, some of them twice the same."""
    stem, *ends = random_tokens(5, [100, 9, 20, 3, 14, 2])
    whole = [*stem, *ends[0]]
    return [whole, [*stem, *ends[1]], [*stem[:70], *ends[2]], [*stem[:70], *ends[3]], whole, [*stem[:33], *ends[4]]]


def answers(llm: LLM, prompts: list[list[int]], *, at_once: bool) -> list[Any]:
    wanted = [{"prompt_token_ids": prompt} for prompt in prompts]
    if at_once:
        return llm.generate(wanted, PARAMS, use_tqdm=False)
    return [answer for one in wanted for answer in llm.generate([one], PARAMS, use_tqdm=False)]


def largest_difference(first: list[Any], second: list[Any]) -> float:
    worst = 0.0
    for one, other in zip(first, second, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        apart = table(one.outputs[0].logprobs) - table(other.outputs[0].logprobs)
        worst = max(worst, apart.abs().max().item())
    return worst


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", sampled(SHARING, lambda case: case in ("mamba", "bamba", "lfm2", "kimi_linear")))
def test_a_hit_changes_nothing(case: str, way: str, tmp_path: Path) -> None:
    """One after the other, and then all at once, beside each other's decode rows."""
    made, config = CASES[case]
    checkpoints.save(checkpoints.make(made, **config), tmp_path)
    with LLM(str(tmp_path), **USUAL) as llm:
        plain = answers(llm, branching(), at_once=False)
        assert not any(answer.num_cached_tokens for answer in plain), "it was not asked for"
        assert llm.llm_engine.client.stats().prefix_queries == 0
    with LLM(str(tmp_path), **USUAL, **WAYS[way], enable_prefix_caching=True) as llm:
        first = answers(llm, branching(), at_once=False)
        again = answers(llm, branching(), at_once=True)
        assert llm.call("check") is None
        hits = llm.llm_engine.client.stats().prefix_hits
        assert llm.reset_prefix_cache()
        assert answers(llm, branching()[:1], at_once=True)[0].num_cached_tokens == 0
    assert largest_difference(plain, first) <= 1e-4
    assert largest_difference(plain, again) <= 1e-4
    cached = [answer.num_cached_tokens for answer in first]
    assert cached[0] == 0
    assert cached[3] > 0, "others have begun so twice"
    assert cached[4] >= 64, "it is there a second time"
    assert all(answer.num_cached_tokens > 0 for answer in again[:5])
    told = sum(answer.num_cached_tokens for answer in [*first, *again])
    assert hits >= told
    assert hits == told or WAYS[way].get("preempt_every_step")


@pytest.mark.parametrize("case", ["bamba", "mamba2"])
def test_copies_make_room_for_whoever_runs(case: str, tmp_path: Path) -> None:
    """In a cache that hardly holds two requests: pages of copies become keys, values and others' states."""
    made, config = CASES[case]
    checkpoints.save(checkpoints.make(made, **config), tmp_path)
    with LLM(str(tmp_path), **USUAL, max_num_seqs=4) as llm:
        plain = answers(llm, branching(), at_once=False)
        blocks = llm.llm_engine.client.stats().num_blocks // 2 + 2  # of what four requests can fill
    options = {**USUAL, "num_gpu_blocks_override": blocks, "max_prefill_chunk": 24}
    with LLM(str(tmp_path), **options, enable_prefix_caching=True) as llm:
        made_at_once = [answers(llm, branching(), at_once=True) for _ in range(3)]
        assert llm.call("check") is None
        assert llm.llm_engine.client.stats().prefix_hits > 0
    assert max(largest_difference(plain, found) for found in made_at_once) <= 1e-4
