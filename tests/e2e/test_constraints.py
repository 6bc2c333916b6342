"""Constrained answers of the real worker are what transformers gives under the same constraint, however the work is
cut; and whoever is not constrained gets what it would have got alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.engine import grammars
from quire.engine.client import InProcessClient
from quire.types.output import EngineOutput
from quire.types.plan import StepPlan
from quire.types.request import EngineRequest, token_array
from quire.types.sampling import SamplingParams
from quire.types.structured import Constraint
from quire.worker.assembly import Assembly
from quire.worker.graphs import DecodeGraphs, DecodeSize, decode_sizes
from quire.worker.mixed_graphs import MixedSize
from quire.worker.runner import Runner
from quire.worker.sampling.masks import Masks
from quire.worker.worker import Worker
from tests.e2e.conftest import VOCAB, Reference
from tests.e2e.test_greedy_equals_transformers import prompts
from tests.e2e.test_padded_steps import steps  # noqa: F401 (a fixture)
from tests.engine.toy_service import ToyService
from tests.scheduling.toy_grammar import EOS, meaning, random_constraint

TOKENS = 12
COUNT = 24


@pytest.fixture(autouse=True)
def toy_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(grammars, "GrammarService", ToyService)
    ToyService.made.clear()
    yield
    for service in ToyService.made:
        service.close()


def requests(**params: Any) -> list[EngineRequest]:
    """Two of three are constrained."""
    rng = random.Random(17)
    made = []
    for number, prompt in enumerate(prompts(COUNT, longest=60, seed=21)):
        sampling = SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, "seed": number, **params})
        made.append(
            EngineRequest(
                id=f"r{number}", token_ids=token_array(prompt), params=sampling, max_tokens=TOKENS,
                stop_token_ids=[EOS], eos_token_id=EOS, seed=number,
                constraint=random_constraint(rng) if number % 3 else None,
            )
        )  # fmt: skip
    return made


def run(folder: Path, wanted: list[EngineRequest], **options: Any) -> dict[str, list[EngineOutput]]:
    options = {"device": "cpu", "num_threads": 1, "max_model_len": 256, "skip_tokenizer_init": True, **options}
    client = InProcessClient(resolve(EngineConfig.from_flat(model=str(folder), **options)))
    try:
        for request in wanted:
            client.add(request)
        told: dict[str, list[EngineOutput]] = {request.id: [] for request in wanted}
        unfinished = set(told)
        while unfinished:
            for output in client.poll(30).each():
                assert output.error is None, output
                told[output.request_id].append(output)
                if output.finish_reason is not None:
                    unfinished.remove(output.request_id)
        client.call("check")
    finally:
        client.shutdown()
    return told


def tokens(told: dict[str, list[EngineOutput]]) -> dict[str, list[int]]:
    return {name: [token for output in outputs for token in output.token_ids] for name, outputs in told.items()}


def ends(request: EngineRequest, output: list[int]) -> bool:
    """Whether the answer ends here, other than by its length."""
    now = meaning(request.constraint or Constraint(), output, [EOS])
    return now.is_over or (output[-1:] == [EOS] and not now.outlives_stop)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[str, list[int]]:
    """By transformers: one request at a time, what may be sampled told anew for every token."""
    import torch

    answers = {}
    for request in requests():
        num_prompt = len(request.token_ids)

        def allowed(_batch: int, ids: Any, request: EngineRequest = request, num_prompt: int = num_prompt) -> list[int]:
            if request.constraint is None:
                return list(range(VOCAB))
            output = ids[num_prompt:].tolist()
            if any(ends(request, output[:length]) for length in range(len(output) + 1)):
                return [EOS]  # whatever comes now is cut off
            may_follow = meaning(request.constraint, output, [EOS]).allowed
            return list(range(VOCAB)) if may_follow is None else sorted(may_follow)

        with torch.inference_mode():
            ids = reference._model.generate(
                torch.tensor([request.token_ids]),
                attention_mask=torch.ones(1, num_prompt, dtype=torch.long),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=EOS,
                prefix_allowed_tokens_fn=allowed,
            )[0, num_prompt:].tolist()
        answers[request.id] = next(ids[:n] for n in range(TOKENS + 1) if n == TOKENS or ends(request, ids[:n]))
    assert sum(len(ids) > 3 for ids in answers.values()) > COUNT / 2
    return answers


CPU: dict[str, dict[str, Any]] = {
    "depth 1": {},
    "depth 2": {"async_scheduling": True},
    "a worker process": {"distributed_executor_backend": "mp"},
    "chunks of 16, few seats": {"max_prefill_chunk": 16, "max_num_seqs": 5, "async_scheduling": True},
    "no prefix cache": {"enable_prefix_caching": False},
    "a preemption at every step": {"preempt_every_step": True, "max_num_seqs": 5, "async_scheduling": True},
    "a pool so small that requests are preempted": {"num_gpu_blocks_override": 17, "async_scheduling": True},
}
GPU: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "depth 1": {"async_scheduling": False},
    "a worker process": {"distributed_executor_backend": "mp"},
    "chunks of 16, few seats": {"max_prefill_chunk": 16, "max_num_seqs": 5},
    "a preemption at every step": {"preempt_every_step": True, "max_num_seqs": 5},
}
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}


@pytest.mark.parametrize("case", CPU)
def test_greedy_under_constraints(tiny_qwen3: Path, expected: dict[str, list[int]], case: str) -> None:
    assert tokens(run(tiny_qwen3, requests(), **CPU[case])) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU)
def test_greedy_under_constraints_on_a_gpu(tiny_qwen3: Path, expected: dict[str, list[int]], case: str) -> None:
    assert tokens(run(tiny_qwen3, requests(), **{**ON_GPU, **GPU[case]})) == expected


@pytest.fixture
def tails(
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[StepPlan, MixedSize | None]],  # noqa: F811, ARG001
) -> list[DecodeSize]:
    """Decode steps replay "graphs" of Python too; the sizes of the tails that were replayed."""
    replayed: list[DecodeSize] = []
    build = Assembly.runner

    def build_with_graphs(self: Assembly, *args: Any, **options: Any) -> Runner:
        runner = build(self, *args, **options)
        sizes = decode_sizes([1, 2, 4, 6], False)
        runner.decode.graphs = graphs = DecodeGraphs(sizes)
        for size in sizes:
            graphs._forwards[size] = SimpleNamespace(replay=partial(runner.decode.forward, size, None))
            for filtered in (False, True):
                tail = partial(runner.decode.tail, size, filtered)
                graphs._tails[size.rows, filtered] = SimpleNamespace(replay=tail)
        graphs.tail = lambda size, *, filtered: (  # type: ignore[method-assign]
            replayed.append(size),
            graphs._tails[size.rows, filtered].replay(),
        )
        return runner

    monkeypatch.setattr(Assembly, "runner", build_with_graphs)
    return replayed


def test_steps_in_the_layout_of_a_graph(
    tiny_qwen3: Path,
    expected: dict[str, list[int]],
    steps: list[tuple[StepPlan, MixedSize | None]],  # noqa: F811
    tails: list[DecodeSize],
) -> None:
    masked: list[int] = []
    apply = Masks.apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Masks, "apply", lambda self, *args: masked.append(len(self.rows)) or apply(self, *args))
        options = {"max_prefill_chunk": 16, "max_num_batched_tokens": 64, "max_num_seqs": 6, "async_scheduling": True}
        assert tokens(run(tiny_qwen3, requests(), **options)) == expected
    assert sum(plan.awaits_masks and size is not None for plan, size in steps) > 5
    assert len(tails) > 10
    assert len(masked) > 10


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 12},
    {"temperature": 0, "repetition_penalty": 1.3, "prompt_logprobs": 1, "skip_reading_prefix_cache": True},
    {"temperature": 1.1, "logit_bias": {3: 2.0, 9: -1.0}, "min_p": 0.02},
    {"temperature": 0.8, "bad_words_token_ids": [[150], [2, 3]]},
]


def mixed_requests() -> list[EngineRequest]:
    """Constraints beside every other wish. 150 is in no grammar, so some token is always left."""
    made = []
    for number, request in enumerate(requests()):
        params = SamplingParams(max_tokens=TOKENS, seed=number, **KINDS[number % len(KINDS)])
        made.append(EngineRequest(**{**{f: getattr(request, f) for f in request.__struct_fields__}, "params": params}))
    return made


def comparable(told: dict[str, list[EngineOutput]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, outputs in told.items():
        lines = [line for output in outputs for line in output.logprobs or []]
        ids = [sorted(line.token_ids[1:]) for line in lines]
        found[name] = (tokens({name: outputs})[name], outputs[-1].finish_reason, [line.rank for line in lines], ids)
    return found


def check_obeyed(wanted: list[EngineRequest], told: dict[str, list[EngineOutput]]) -> None:
    for request in wanted:
        if request.constraint is not None:
            ids = tokens(told)[request.id]
            for length, token in enumerate(ids):
                assert not ends(request, ids[:length])
                allowed = meaning(request.constraint, ids[:length], [EOS]).allowed
                assert allowed is None or token in allowed


@pytest.fixture(scope="module")
def mixed(tiny_qwen3: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "GrammarService", ToyService)
        told = run(tiny_qwen3, mixed_requests(), enable_prefix_caching=False)
    check_obeyed(mixed_requests(), told)
    assert any(len(line) > 3 for _, _, line, _ in comparable(told).values())
    return comparable(told)


@pytest.mark.parametrize(
    "case", ["depth 2", "a worker process", "chunks of 16, few seats", "a preemption at every step"]
)
def test_constraints_beside_every_other_wish(tiny_qwen3: Path, mixed: dict[str, Any], case: str) -> None:
    assert comparable(run(tiny_qwen3, mixed_requests(), **CPU[case])) == mixed


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU)
def test_constraints_beside_every_other_wish_on_a_gpu(tiny_qwen3: Path, mixed: dict[str, Any], case: str) -> None:
    told = run(tiny_qwen3, mixed_requests(), **{**ON_GPU, **GPU[case]})
    check_obeyed(mixed_requests(), told)
    found = comparable(told)
    assert sum(found[name][:2] == mixed[name][:2] for name in mixed) >= COUNT - 1  # a draw may fall on a border


def test_min_tokens_never_outlives_a_complete_grammar(tiny_qwen3: Path) -> None:
    wanted = requests(min_tokens=TOKENS)
    told = run(tiny_qwen3, wanted, async_scheduling=True)
    for request in wanted:
        ids, last = tokens(told)[request.id], told[request.id][-1]
        if request.constraint is None or request.constraint.grammar is None:
            assert len(ids) == TOKENS
        elif last.finish_reason == "stop":
            assert meaning(request.constraint, ids, [EOS]).is_over
            assert last.lacks_stop_token  # the end itself was forbidden, and nothing else was left
    check_obeyed(wanted, told)


def test_a_neighbours_masks_change_no_token(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of the requests that is not constrained: alone, and beside the others."""
    masked: list[int] = []
    mask = Worker.mask
    monkeypatch.setattr(Worker, "mask", lambda self, masks: masked.append(len(masks.rows)) or mask(self, masks))
    wanted = requests()
    alone = run(tiny_qwen3, [r for r in wanted if r.constraint is None], async_scheduling=True)
    assert not masked
    beside = run(tiny_qwen3, wanted, async_scheduling=True)
    assert sum(masked) > COUNT
    assert tokens(alone) == {name: ids for name, ids in tokens(beside).items() if name in alone}
