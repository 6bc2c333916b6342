"""Users' logits processors on the real worker: what transformers gives under the same rule, and nobody else is
touched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutputKind, SamplingParams
from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.engine.client import InProcessClient
from quire.foundation.errors import ConfigError, InputError
from quire.types.output import EngineOutput
from quire.types.request import EngineRequest, token_array
from quire.worker.sampling.custom import CustomProcessors
from tests.e2e.conftest import Reference
from tests.e2e.processors import ALL, HERE, Force
from tests.e2e.test_greedy_equals_transformers import prompts

TOKENS = 64
ENGINE: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 192, "skip_tokenizer_init": True}


def params(**arguments: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, extra_args=arguments or None
    )


def ask(llm: LLM, given: list[list[int]], wanted: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in given], wanted, use_tqdm=False)
    assert llm.call("check") is None
    return outputs


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def without_repeats(tiny_qwen3: Path) -> list[list[int]]:
    """Of `prompts(12)`, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
    found = []
    for prompt in prompts(12, seed=31):
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=TOKENS, min_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0, no_repeat_ngram_size=2,
        )  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"async_scheduling": True, "max_prefill_chunk": 16},
        {"async_scheduling": True, "preempt_every_step": True},
        pytest.param({"device": "cuda", "dtype": "float32"}, marks=pytest.mark.gpu),
    ],
    ids=["depth 1", "depth 2, chunks", "depth 2, preempted", "GPU"],
)
def test_what_transformers_gives_under_the_same_rule(
    tiny_qwen3: Path, reference: Reference, without_repeats: list[list[int]], options: dict[str, Any]
) -> None:
    given = prompts(12, seed=31)
    ways = [{"no_repeat": "device"}, {"no_repeat": "host"}, {}]
    wanted = [params(**ways[number % 3]) for number in range(12)]
    expected = [
        reference.greedy(prompt, TOKENS) if number % 3 == 2 else without_repeats[number]
        for number, prompt in enumerate(given)
    ]
    assert sum(reference.greedy(prompt, TOKENS) != one for prompt, one in zip(given, expected, strict=True)) >= 3
    with LLM(str(tiny_qwen3), logits_processors=ALL, **{**ENGINE, **options}) as llm:
        assert tokens(ask(llm, given, wanted)) == expected


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def llm(tiny_qwen3: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    options = {**ENGINE, "device": request.param, "dtype": "float32", "async_scheduling": True}
    with LLM(str(tiny_qwen3), logits_processors=ALL, **options) as llm:
        yield llm


def test_a_failure_ends_the_requests_it_was_raised_for(llm: LLM, reference: Reference) -> None:
    given = prompts(7, seed=5, longest=20)
    wanted = [
        params(fail_at=5),
        params(),
        params(fail_at="admit"),
        params(force=[7, 8, 9]),
        params(fail_together=1),
        params(fail_together=1),
        params(fail_at=0),
    ]
    outputs = ask(llm, given, wanted)
    errors = [output.error for output in outputs]
    assert errors == [
        "the logits processor Force failed: ZeroDivisionError: at token 5",
        None,
        "the logits processor Force failed: ZeroDivisionError: at the door",
        None,
        *2 * ["the logits processor FailTogether failed: TypeError: it must edit the logits in place, or return a "
              "tensor of the same shape"],
        "the logits processor Force failed: ZeroDivisionError: at token 0",
    ]  # fmt: skip
    assert [output.outputs[0].finish_reason for output in outputs] == [
        "error", "length", "error", "length", "error", "error", "error",
    ]  # fmt: skip
    assert tokens(outputs)[0] == reference.greedy(given[0], 5)
    assert tokens(outputs)[1] == reference.greedy(given[1], TOKENS)
    assert tokens(outputs)[3][:3] == [7, 8, 9]
    assert tokens(ask(llm, given[:1], [params()])) == [reference.greedy(given[0], TOKENS)]


@pytest.mark.parametrize("output_kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
def test_failures_leave_nothing_behind(tiny_qwen3: Path, reference: Reference, output_kind: RequestOutputKind) -> None:
    """At random tokens of many requests, some of which are preempted just then."""
    rng = random.Random(9)
    given = prompts(24, seed=14, longest=40)
    fails = [rng.choice([None, rng.randrange(20)]) for _ in given]
    options = {"preempt_every_step": True, "async_scheduling": True, "debug": True, "max_num_seqs": 8}
    resolved = resolve(EngineConfig.from_flat(model=str(tiny_qwen3), logits_processors=ALL, **ENGINE, **options))
    client = InProcessClient(resolved)
    told: dict[str, list[EngineOutput]] = {}
    try:
        for number, (prompt, fail_at) in enumerate(zip(given, fails, strict=True)):
            arguments = {} if fail_at is None else {"extra_args": {"fail_at": fail_at}}
            sampling = SamplingParams(temperature=0, max_tokens=20, output_kind=output_kind, **arguments)
            client.add(EngineRequest(id=str(number), token_ids=token_array(prompt), params=sampling, max_tokens=20))
            told[str(number)] = []
        while any(not outputs or outputs[-1].finish_reason is None for outputs in told.values()):
            for output in client.poll(1.0).each():
                told[output.request_id].append(output)
    finally:
        client.shutdown()
    for number, (prompt, fail_at) in enumerate(zip(given, fails, strict=True)):
        outputs = told[str(number)]
        answer = [token for output in outputs for token in output.token_ids]
        assert answer == reference.greedy(prompt, 20 if fail_at is None else fail_at)
        assert outputs[-1].finish_reason == ("length" if fail_at is None else "error")


def test_steps_that_nobody_wants_are_not_touched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a processor was asked")

    monkeypatch.setattr(CustomProcessors, "apply", never)
    given = prompts(3, seed=6, longest=20)
    ask(llm, given, [params(), params(harmless=True), SamplingParams(max_tokens=5, detokenize=False, seed=1)])


def test_argmax_invariant_processors_see_random_rows(llm: LLM, reference: Reference) -> None:
    prompt = prompts(1, seed=8)
    drawn = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True, detokenize=False, seed=3)
    changed = drawn.clone(extra_args={"harmless": True})
    outputs = tokens(ask(llm, prompt * 2, [drawn, changed]))
    assert outputs[1] == reference.greedy(prompt[0], 9) != outputs[0]


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    prompt = prompts(1, seed=9)
    forced = params(force=[3]).clone(max_tokens=1, logprobs=1)
    (output,) = ask(llm, prompt, [forced])
    entry = output.outputs[0].logprobs[0]
    assert output.outputs[0].token_ids == [3]
    assert entry[3].logprob < -1
    assert max(entry.values(), key=lambda e: e.logprob).rank == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"force": "x"}, "extra_args: Force refuses them: force must be a list of token ids, got 'x'"),
        ({"force": [1], "big": "x" * 70_000}, "extra_args may take 65536 bytes as JSON"),
        ({"force": object()}, "extra_args must hold plain data"),
        ({1: 2}, "strings as keys"),
        ([1], "must be a dict"),
    ],
)
def test_arguments_are_checked_at_the_door(llm: LLM, arguments: Any, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")) as caught:
        ask(llm, [[1]], [SamplingParams(extra_args=arguments)])
    assert caught.value.param == "extra_args"


def test_functions_of_a_request_are_refused_with_the_way_to_do_it() -> None:
    with pytest.raises(InputError, match=r"LLM\(logits_processors="):
        SamplingParams(logits_processors=[lambda _ids, logits: logits])


def test_an_engine_without_processors_takes_no_arguments(tiny_qwen3: Path) -> None:
    with LLM(str(tiny_qwen3), **ENGINE) as llm, pytest.raises(InputError, match="started without any"):
        ask(llm, [[1]], [params(force=[1])])


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        ("tests.e2e.processors:Missing", "has no 'Missing'"),
        ("no.such.module:Thing", "there is no module"),
        ("not_installed", "unknown logits processor 'not_installed'"),
        (f"{HERE}:torch", "is no logits processor"),
        (f"{HERE}:Neither", "must override one of apply and apply_row"),
        (f"{HERE}:CannotBeMade", "cannot be made: FileNotFoundError"),
        (3, "must hold classes or names"),
    ],
)
def test_processors_are_checked_at_the_start(tiny_qwen3: Path, processor: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        LLM(str(tiny_qwen3), logits_processors=[processor], **ENGINE)
    assert caught.value.field == "logits_processors"


def test_classes_and_installed_names(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that no other process could import, and one that an installed package has named."""
    from quire.config.logits_processors import LOGITS_PROCESSORS

    class Local(Force):
        def admit(self, params: SamplingParams) -> Any:
            return {"force": [4]} if params.extra_args else None

    monkeypatch.setitem(LOGITS_PROCESSORS._targets, "forced", f"{HERE}:Force")
    with LLM(str(tiny_qwen3), logits_processors=[Local, "forced"], **ENGINE) as llm:
        assert tokens(ask(llm, [[1]], [params(force=[3, 5])]))[0][1] == 5


def test_the_example_of_the_docs(tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")
    (tmp_path / "my_processors.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with LLM(str(tiny_qwen3), logits_processors=["my_processors:NoRepeat"], **ENGINE) as llm:
        found = [17, *tokens(ask(llm, [[17]], [params(window=8)]))[0]]
        with pytest.raises(InputError, match="window must be an integer"):
            ask(llm, [[17]], [params(window=0)])
    assert all(token not in found[max(0, i - 8) : i] for i, token in enumerate(found))


def test_what_a_grammar_forbids_stays_forbidden() -> None:
    """On the demo model: the processor wants token 77 above all, the grammar one of two words."""
    with LLM(device="cpu", num_threads=1, max_model_len=64, logits_processors=[Force]) as llm:
        asked = SamplingParams(
            max_tokens=8, seed=1, structured_outputs={"choice": ["yes", "no"]}, extra_args={"force": [77] * 8}
        )
        (output,) = llm.generate("Is it?", asked, use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")


@pytest.mark.long  # as `test_ranks.py` has two of them
def test_in_a_worker_process(tiny_qwen3: Path, reference: Reference) -> None:
    given = prompts(3, seed=12, longest=20)
    with LLM(str(tiny_qwen3), logits_processors=ALL, distributed_executor_backend="mp", **ENGINE) as llm:
        outputs = ask(llm, given, [params(force=[6, 5]), params(fail_at=2), params()])
    assert tokens(outputs)[0][:2] == [6, 5]
    assert outputs[1].error == "the logits processor Force failed: ZeroDivisionError: at token 2"
    assert tokens(outputs)[1:] == [reference.greedy(given[1], 2), reference.greedy(given[2], TOKENS)]
