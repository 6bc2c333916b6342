"""Decode rows that begin alike read that part once, through one of them: greedy text stays what it is alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.attention.base import prefix_tile_rows
from quire.config.attention import ATTENTION_BACKENDS
from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.engine import core
from quire.engine.client import InProcessClient
from quire.frontend.async_engine import AsyncLLM
from quire.scheduling.prefixes import SharingThresholds
from quire.scheduling.scheduler import Scheduler
from quire.types.plan import StepPlan
from quire.types.sampling import RequestOutputKind
from quire.worker.batch import BatchBuilder
from quire.worker.prefixes import PrefixLayout
from tests.attention.prefix_reference import PrefixReference
from tests.e2e.conftest import VOCAB, Reference

TOKENS = 24
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 512,
    "skip_tokenizer_init": True,
    "attention_backend": "prefix_reference",
}


@pytest.fixture(autouse=True)
def reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        ATTENTION_BACKENDS._targets, "prefix_reference", "tests.attention.prefix_reference:PrefixReference"
    )
    monkeypatch.setattr(PrefixReference, "num_shared_rows", 0)
    monkeypatch.setattr(PrefixReference, "num_tiles", 0)


@pytest.fixture
def anything_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "Scheduler", partial(Scheduler, sharing_thresholds=SharingThresholds(1, 1, 1)))


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(count)]


def family(seed: int, *, stems: int, count: int, longest: int = 40) -> list[list[int]]:
    """Prompts of which many begin alike: stems that begin like other stems, tails of their own, some without a stem."""
    rng = random.Random(seed)
    known = [ids(rng, 40)]
    for _ in range(stems - 1):
        known.append(rng.choice(known)[: rng.randint(16, 40)] + ids(rng, rng.randint(10, 60)))
    prompts = [rng.choice(known) + ids(rng, rng.randint(1, longest)) for _ in range(count - 2)]
    return [*prompts, ids(rng, 5), ids(rng, 50)]


def answers(llm: LLM, wanted: list[list[int]], tokens: Callable[[int], int]) -> list[list[int]]:
    params = [
        SamplingParams(temperature=0, max_tokens=tokens(i), ignore_eos=True, detokenize=False)
        for i in range(len(wanted))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in wanted], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "depth 2": {"async_scheduling": True},
    "few seats and a small budget": {"max_num_seqs": 7, "max_num_batched_tokens": 40, "async_scheduling": True},
    "chunks of 16": {"max_prefill_chunk": 16},
    "a pool so small that requests are preempted": {"num_gpu_blocks_override": 40, "async_scheduling": True},
    "blocks of 32": {"block_size": 32},
}


@pytest.mark.usefixtures("anything_is_worth_it")
@pytest.mark.parametrize("case", CASES)
def test_many_that_begin_alike(tiny_qwen3: Path, reference: Reference, case: str) -> None:
    wanted = family(3, stems=5, count=32)

    def tokens(i: int) -> int:  # rows leave and come all the time
        return 2 + i * 7 % TOKENS

    expected = [reference.greedy(prompt, tokens(i)) for i, prompt in enumerate(wanted)]
    with LLM(str(tiny_qwen3), **OPTIONS, **CASES[case]) as llm:
        for _ in range(2):  # the second time everything is cached
            assert answers(llm, wanted, tokens) == expected
        assert llm.call("check") is None
    assert PrefixReference.num_shared_rows > 100


@pytest.mark.usefixtures("anything_is_worth_it")
def test_a_preemption_at_every_step(tiny_qwen3: Path, reference: Reference) -> None:
    wanted = family(11, stems=2, count=8)
    expected = [reference.greedy(prompt, TOKENS) for prompt in wanted]
    with LLM(str(tiny_qwen3), **OPTIONS, preempt_every_step=True, async_scheduling=True) as llm:
        assert answers(llm, wanted, lambda _: TOKENS) == expected
    assert PrefixReference.num_shared_rows > 10


@pytest.mark.usefixtures("anything_is_worth_it")
def test_a_group_of_more_rows_than_a_tile_holds(tiny_qwen3: Path, reference: Reference) -> None:
    rng = random.Random(5)
    stem = ids(rng, 40)
    count = prefix_tile_rows(group=2) + 6
    wanted = [stem + ids(rng, 1 + i % 3) for i in range(count)]
    expected = [reference.greedy(prompt, 4) for prompt in wanted]
    with LLM(str(tiny_qwen3), **OPTIONS, max_num_seqs=count) as llm:
        assert answers(llm, wanted, lambda _: 4) == expected
    assert PrefixReference.num_shared_rows == count * 3
    assert PrefixReference.num_tiles == 2 * 3


@pytest.mark.usefixtures("anything_is_worth_it")
def test_clients_that_hang_up(tiny_qwen3: Path, reference: Reference) -> None:
    """Rows that are aborted leave their group; the seat's next owner is not taken for a member."""
    wanted = family(17, stems=3, count=30)
    expected = [reference.greedy(prompt, TOKENS) for prompt in wanted]
    rng = random.Random(1)
    stays = [rng.randint(1, 10) if i % 3 == 1 else TOKENS for i in range(len(wanted))]  # tokens until it hangs up
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )

    async def ask(llm: AsyncLLM, i: int) -> list[int]:
        told: list[int] = []
        async with aclosing(llm.generate({"prompt_token_ids": wanted[i]}, params, f"r{i}")) as stream:
            async for output in stream:
                told += output.outputs[0].token_ids
                if len(told) >= stays[i]:
                    break
        return told

    async def main() -> None:
        config = EngineConfig.from_flat(model=str(tiny_qwen3), **OPTIONS, max_num_seqs=6, async_scheduling=True)
        llm = AsyncLLM(InProcessClient(resolve(config)), None)
        try:
            told = await asyncio.gather(*(ask(llm, i) for i in range(len(wanted))))
            assert [tokens[:stay] for tokens, stay in zip(told, stays, strict=True)] == [
                tokens[:stay] for tokens, stay in zip(expected, stays, strict=True)
            ]
            assert await llm.call("check") is None
        finally:
            llm.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))
    assert PrefixReference.num_shared_rows > 50


@pytest.mark.usefixtures("anything_is_worth_it")
def test_answers_to_one_prompt_share_it(tiny_qwen3: Path) -> None:
    prompt = ids(random.Random(31), 100)
    params = SamplingParams(n=6, temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, detokenize=False)
    texts = []
    for backend in ("prefix_reference", "torch_cpu"):
        with LLM(str(tiny_qwen3), **{**OPTIONS, "attention_backend": backend}) as llm:
            output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
            texts.append([answer.token_ids for answer in output.outputs])
    assert texts[0] == texts[1]
    assert PrefixReference.num_shared_rows >= 5 * 15


def test_only_what_saves_many_reads_is_shared(tiny_qwen3: Path, reference: Reference) -> None:
    """With the bar where it is for real: 40 rows with 300 tokens in common pass it, 4 do not."""
    rng = random.Random(7)
    stem = ids(rng, 300)
    wanted = [stem + ids(rng, 1 + i) for i in range(40)]
    with LLM(str(tiny_qwen3), **OPTIONS) as llm:
        few = answers(llm, wanted[:4], lambda _: 8)
        assert PrefixReference.num_shared_rows == 0
        many = answers(llm, wanted, lambda _: 8)
        assert PrefixReference.num_shared_rows >= 40 * 5
    assert few == many[:4] == [reference.greedy(prompt, 8) for prompt in wanted[:4]]
    assert many[20] == reference.greedy(wanted[20], 8)


@pytest.mark.gpu
@pytest.mark.usefixtures("anything_is_worth_it")
@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"cuda_graph_sizes": [3, 17, 40]}, {"num_gpu_blocks_override": 60}],
    ids=str,
)
def test_on_a_gpu(
    tiny_qwen3: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The same through the kernels, from graphs and without."""
    laid_out = []
    layout = BatchBuilder.layout

    def watched(self: BatchBuilder, plan: StepPlan) -> PrefixLayout | None:
        laid_out.append(layout(self, plan))
        return laid_out[-1]

    monkeypatch.setattr(BatchBuilder, "layout", watched)
    wanted = [*family(3, stems=5, count=32), *family(4, stems=1, count=40)]

    def tokens(i: int) -> int:
        return 2 + i * 7 % TOKENS

    expected = [reference.greedy(prompt, tokens(i)) for i, prompt in enumerate(wanted)]
    on_gpu = {"device": "cuda", "dtype": "float32", "attention_backend": "auto", "max_num_seqs": 48}
    with LLM(str(tiny_qwen3), **{**OPTIONS, **on_gpu, **options}) as llm:
        for _ in range(2):
            assert answers(llm, wanted, tokens) == expected
    assert sum(made is not None for made in laid_out) > 20
