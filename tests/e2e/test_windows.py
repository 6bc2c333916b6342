"""Models whose layers have sliding windows, all or some: what transformers computes, however the work is cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.attention import ATTENTION_BACKENDS
from quire.engine import core
from quire.scheduling.prefixes import SharingThresholds
from quire.scheduling.scheduler import Scheduler
from quire.types.output import EngineStats
from tests.attention.prefix_reference import PrefixReference
from tests.e2e.conftest import VOCAB
from tests.models import checkpoints

FULL, SLIDING = "full_attention", "sliding_attention"
SHAPE = {"vocab_size": VOCAB, "max_position_embeddings": 1024, "num_hidden_layers": 6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3: five to one": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 24, "layer_types": [SLIDING] * 5 + [FULL]},
    ),
    "qwen3: uneven": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": [FULL, SLIDING, SLIDING, FULL, FULL, FULL],
        },
    ),
    "qwen2: the upper layers": ("Qwen2", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 3}),
    "ministral: one to two": (
        "Ministral",
        {"head_dim": 12, "sliding_window": 33, "layer_types": [FULL, SLIDING, SLIDING] * 2},
    ),
    "mistral: all": ("Mistral", {"sliding_window": 24}),
    "ministral: all, of one token": ("Ministral", {"head_dim": 12, "sliding_window": 1}),
}
TOKENS = 40


class Model:
    def __init__(self, folder: Path, family: str, config: dict[str, Any]) -> None:
        self.reference = checkpoints.make(family, **{**SHAPE, **config})
        self.folder = checkpoints.save(self.reference, folder)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Of what may follow each of the tokens."""
        with torch.inference_mode():
            return self.reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    return cache(lambda name: Model(tmp_path_factory.mktemp("windows"), *MODELS[name]))


@pytest.fixture(scope="module")
def five_to_one(models: Callable[[str], Model]) -> Model:
    return models("qwen3: five to one")


def engine(model: Model, **options: Any) -> LLM:
    options = {"device": "cpu", "num_threads": 1, "max_model_len": 512, "skip_tokenizer_init": True, **options}
    return LLM(str(model.folder), **options)


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(count)]


def prompts(seed: int = 0) -> list[list[int]]:
    """Some longer than any window, some that begin alike."""
    rng = random.Random(seed)
    stem = ids(rng, 130)
    return [ids(rng, 200), ids(rng, 5), *(stem + ids(rng, n) for n in (1, 20, 50)), stem[:70] + ids(rng, 9), stem]


GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=2)
DRAFTS = {
    "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1, "policy": "always",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculative_config": DRAFTS, "async_scheduling": True},
    "drafts, and preemptions": {"speculative_config": DRAFTS, "preempt_every_step": True, "max_num_seqs": 3},
    "chunks of 16, depth 2": {"max_prefill_chunk": 16, "async_scheduling": True},
    "a small budget, no prefix cache": {
        "max_num_batched_tokens": 37,
        "max_num_seqs": 5,
        "enable_prefix_caching": False,
    },
    "a preemption at every step": {"preempt_every_step": True, "max_num_seqs": 3, "async_scheduling": True},
}
FEW = {  # what runs by default of all models in all cases
    ("qwen3: five to one", "a preemption at every step"),
    ("qwen2: the upper layers", "plain"),
    ("ministral: one to two", "chunks of 16, depth 2"),
    ("mistral: all", "a preemption at every step"),
    *((name, "drafts") for name in MODELS),
    ("qwen3: uneven", "drafts, and preemptions"),
    ("mistral: all", "drafts, and preemptions"),
}
ALL = [
    pytest.param(name, case, marks=() if (name, case) in FEW else pytest.mark.long) for name in MODELS for case in CASES
]
CACHED = [pytest.param(name, marks=() if "five" in name or "all" in name else pytest.mark.long) for name in MODELS]


def check(model: Model, llm: LLM, wanted: list[list[int]], params: SamplingParams = GREEDY) -> list[int]:
    """Every token is a likeliest one of transformers', with its log-probability.

    Returns how many tokens of each were cached.
    """
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in wanted], params, use_tqdm=False)
    assert llm.call("check") is None
    for prompt, output in zip(wanted, outputs, strict=True):
        answer = output.outputs[0]
        expected = model.logprobs(prompt + answer.token_ids)
        likely = expected[len(prompt) - 1 : -1]
        taken = likely.gather(-1, torch.tensor(answer.token_ids).unsqueeze(-1)).squeeze(-1)
        assert (likely.max(-1).values - taken).max() <= 2e-4  # of two that are as good as alike, either may win
        for position, found in enumerate(answer.logprobs, len(prompt) - 1):
            for token, line in found.items():
                assert abs(line.logprob - expected[position, token].item()) <= 1e-4
        for position, found in enumerate((output.prompt_logprobs or [])[1:]):
            assert abs(found[prompt[position + 1]].logprob - expected[position, prompt[position + 1]].item()) <= 1e-4
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(("name", "case"), ALL)
def test_text_and_probabilities_are_those_of_transformers(models: Callable[[str], Model], name: str, case: str) -> None:
    with engine(models(name), **CASES[case]) as llm:
        check(models(name), llm, prompts())


@pytest.mark.parametrize("name", CACHED)
def test_hits_of_the_prefix_cache(models: Callable[[str], Model], name: str) -> None:
    """What windows have given back meanwhile is found again as long as nobody needed its pages."""
    model = models(name)
    with engine(model, max_prefill_chunk=48) as llm:
        check(model, llm, prompts())
        cached = check(model, llm, [*prompts(), [*prompts()[2][:140], 7, 8, 9]])
    # Hits end where pages of all layers end: every 32 or 80 tokens or so.
    assert min(cached[2:5]) >= 80
    assert cached[0] >= 160


@pytest.mark.parametrize("drafts", [{}, {"speculative_config": DRAFTS}], ids=["plain", "drafts"])
@pytest.mark.parametrize(
    ("name", "num_blocks"), [("qwen3: five to one", 28), pytest.param("mistral: all", 20, marks=pytest.mark.long)]
)
def test_a_pool_so_small_that_requests_are_preempted(
    models: Callable[[str], Model], name: str, num_blocks: int, drafts: dict[str, Any]
) -> None:
    rng = random.Random(5)
    options = {"num_gpu_blocks_override": num_blocks, "async_scheduling": True, "max_num_seqs": 7, **drafts}
    with engine(models(name), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, detokenize=False, logprobs=1)
        check(models(name), llm, [ids(rng, 4 + n) for n in range(7)], params)
        assert msgspec.convert(llm.call("stats"), EngineStats).num_preemptions > 0


def test_scored_prompts(five_to_one: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, detokenize=False, prompt_logprobs=1, logprobs=1)
    with engine(five_to_one, max_prefill_chunk=32) as llm:
        check(five_to_one, llm, prompts(2), params)


@pytest.mark.parametrize("name", ["qwen3: five to one", "mistral: all"])
def test_penalties_see_the_whole_history(models: Callable[[str], Model], name: str) -> None:
    """Also what no layer keeps any more, and what a hit of the prefix cache has skipped."""
    model = models(name)
    rng = random.Random(4)
    prompt = ids(rng, 180)
    banned = sorted(set(prompt))
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, repetition_penalty=1e6, presence_penalty=2
    )
    with engine(model, max_prefill_chunk=64) as llm:
        for _ in range(2):
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            assert not set(output.outputs[0].token_ids) & set(banned), "a token of the prompt was forgotten"
            assert len(set(output.outputs[0].token_ids)) == min(40, VOCAB - len(banned))
        assert output.num_cached_tokens >= 80
        assert llm.call("check") is None


def test_rows_that_begin_alike_are_read_once_where_layers_see_everything(
    five_to_one: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        ATTENTION_BACKENDS._targets, "prefix_reference", "tests.attention.prefix_reference:PrefixReference"
    )
    monkeypatch.setattr(PrefixReference, "num_shared_rows", 0)
    monkeypatch.setattr(core, "Scheduler", partial(Scheduler, sharing_thresholds=SharingThresholds(1, 1, 1)))
    with engine(five_to_one, attention_backend="prefix_reference", async_scheduling=True) as llm:
        check(five_to_one, llm, prompts(3))
    assert PrefixReference.num_shared_rows > 100


def test_embeddings_instead_of_ids(five_to_one: Model) -> None:
    prompt = prompts()[0]
    embeds = five_to_one.reference.get_input_embeddings()(torch.tensor(prompt)).detach()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    with engine(five_to_one, enable_prompt_embeds=True, max_prefill_chunk=32) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt}, {"prompt_embeds": embeds}], params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_a_model_that_makes_vectors(five_to_one: Model) -> None:
    wanted = prompts()
    with engine(five_to_one, runner="pooling", max_num_batched_tokens=64, max_num_seqs=4) as llm:
        for _ in range(2):
            outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in wanted], use_tqdm=False)
    for prompt, output in zip(wanted, outputs, strict=True):
        with torch.inference_mode():
            states = five_to_one.reference.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(states, dim=0)
        assert (torch.tensor(output.outputs.embedding) - expected).abs().max() <= 1e-4


def test_a_long_request_holds_a_fraction_of_the_pages(five_to_one: Model) -> None:
    """With windows of 24 in five of six layers, at 500 tokens: as with windows of 1,024 at 21,000."""
    with engine(five_to_one, max_prefill_chunk=16, enable_prefix_caching=False) as llm:
        report = llm.llm_engine.client.info.report
        page_bytes = report.kv_bytes / report.num_blocks
        held = []
        real = Scheduler.settle

        def settle(self: Scheduler, *arguments: Any) -> Any:
            stats: EngineStats = self.stats()
            held.append(stats.num_blocks - stats.num_free_blocks)
            assert stats.kv_usage == pytest.approx(held[-1] / stats.num_blocks)
            return real(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scheduler, "settle", settle)
            params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
            llm.generate([{"prompt_token_ids": ids(random.Random(0), 400)}], params, use_tqdm=False)
        stats = msgspec.convert(llm.call("stats"), EngineStats)
        assert stats.num_free_blocks == stats.num_blocks == report.num_blocks - 1
    bytes_of_all = sum(spec.bytes_per_token for spec in report.groups) * 500
    assert {spec.kind: spec.block_size for spec in report.groups} == {"full": 80, "window": 16}
    assert max(held) * page_bytes <= 0.3 * bytes_of_all
