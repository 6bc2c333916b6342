"""LLM: generate, chat, beam search, in input order; mistakes and Ctrl-C leave it usable."""

from __future__ import annotations

import itertools
import math
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.foundation.errors import ConfigError, ContextLengthError, EngineDeadError, InputError
from quire.frontend.async_engine import AsyncLLM
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.names_elsewhere import INSTEAD
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.llm import LLM
from quire.types.sampling import BeamSearchParams, RequestOutputKind, SamplingParams
from tests.frontend.conftest import CHATML
from tests.frontend.echo_engine import EchoClient, log_softmax, make_info, says
from tests.frontend.tokenizers_for_tests import byte_level, save_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(save_folder(folder, byte_level(), eos_token="<|end|>", chat_template=CHATML))


def make(tokenizer: Tokenizer | None, script: Any = None, **info: Any) -> LLM:
    return LLM.from_client(EchoClient(make_info(**info), script), tokenizer)


def client_of(llm: LLM) -> EchoClient:
    client = llm._client
    assert isinstance(client, EchoClient)
    return client


def test_outputs_come_in_the_order_of_the_prompts(tokenizer: Tokenizer) -> None:
    llm = make(tokenizer)
    prompts = ["Hello", {"prompt": "world"}, [5, 6], {"prompt_token_ids": [7]}]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 30, 4)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["Hello", "world", None, None]
    assert [o.prompt_token_ids for o in outputs][2:] == [[5, 6], [7]]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 30, 4]
    for output in outputs:
        assert output.finished
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    assert {r.params.output_kind for r in client_of(llm).added} == {RequestOutputKind.FINAL_ONLY}


@pytest.mark.parametrize(("prompt", "count"), [("one", 1), ([5, 6, 7], 1), ([[5, 6], [7]], 2), ([], 0)])
def test_one_prompt_needs_no_list(tokenizer: Tokenizer, prompt: Any, count: int) -> None:
    assert len(make(tokenizer).generate(prompt, use_tqdm=False)) == count


def test_calls_from_several_threads_wait_for_each_other(tokenizer: Tokenizer) -> None:
    """A thread that drives the engine throws away what others asked for, which would wait for good."""
    llm = make(tokenizer)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    found: list[tuple[str | None, int]] = []

    def ask(text: str) -> None:
        for _ in range(5):
            [output] = llm.generate(text, params, use_tqdm=False)
            found.append((output.prompt, len(output.outputs[0].token_ids)))

    texts = [f"text {number}" for number in range(6)]
    threads = [threading.Thread(target=ask, args=(text,), daemon=True) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted((text, 40) for text in texts * 5)


def test_seeds_priorities_and_defaults(tokenizer: Tokenizer) -> None:
    llm = make(tokenizer, generation_defaults={"temperature": 0.25, "max_tokens": 3})
    llm.generate(["a", "b"], use_tqdm=False, priority=[2, 1])
    assert [r.priority for r in client_of(llm).added] == [2, 1]
    assert {r.params.temperature for r in client_of(llm).added} == {0.25}
    assert llm.get_default_sampling_params().max_tokens == 3
    sampled = SamplingParams(seed=3, n=2, max_tokens=5, ignore_eos=True)
    first, again = (llm.generate("x", sampled, use_tqdm=False)[0] for _ in range(2))
    assert [a.token_ids for a in first.outputs] == [a.token_ids for a in again.outputs]
    assert first.outputs[0].token_ids != first.outputs[1].token_ids
    single = llm.generate("x", sampled.clone(n=1, seed=4), use_tqdm=False)[0]
    assert single.outputs[0].token_ids == first.outputs[1].token_ids, "answer i has seed + i"


def test_stop_strings(tokenizer: Tokenizer) -> None:
    llm = make(tokenizer, says(tokenizer.encode("one two three four")))
    (output,) = llm.generate("x", SamplingParams(stop=[" three"], max_tokens=None), use_tqdm=False)
    assert output.outputs[0].text == "one two"
    assert output.outputs[0].stop_reason == " three"
    assert not client_of(llm).running


@pytest.mark.parametrize(
    ("prompts", "params", "param"),
    [
        (["a", "b"], [SamplingParams()], "sampling_params"),
        (["a", ""], None, "prompt"),
        (["a", [10**6]], None, "prompt"),
        (["a"], {"temperature": 1}, "sampling_params"),
        (["a", "\ud800"], None, "prompt"),
        (["a"], [SamplingParams(logprobs=50)], "logprobs"),
    ],
)
def test_mistakes_run_nothing(tokenizer: Tokenizer, prompts: Any, params: Any, param: str) -> None:
    llm = make(tokenizer)
    with pytest.raises(InputError) as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert caught.value.param == param
    assert client_of(llm).added == []
    assert llm.generate("fine", use_tqdm=False)[0].finished


def test_chat(tokenizer: Tokenizer) -> None:
    llm = make(tokenizer)
    chat = [{"role": "user", "content": "Hi"}]
    for messages in (chat, [chat], [chat, chat]):
        outputs = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
        assert {o.prompt for o in outputs} == {"<|start|>user\nHi<|end|>\n<|start|>assistant\n"}
        assert outputs[0].prompt_token_ids == tokenizer.encode(outputs[0].prompt or "", add_special_tokens=False)
        assert len(outputs) == (2 if messages == [chat, chat] else 1)
    own = llm.chat(chat, use_tqdm=False, chat_template="{{ eos_token }}{{ x }}", chat_template_kwargs={"x": "y"})
    assert own[0].prompt == "<|end|>y"
    going_on = [*chat, {"role": "assistant", "content": "Well"}]
    output = llm.chat(going_on, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)[0]
    assert (output.prompt or "").endswith("assistant\nWell")


def test_token_ids_only() -> None:
    llm = make(None)
    (output,) = llm.generate([[3, 4]], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    for use in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "x"}]), llm.get_tokenizer):
        with pytest.raises(InputError, match="skip_tokenizer_init"):
            use()


def test_refused_requests_do_not_stop_the_others(tokenizer: Tokenizer) -> None:
    llm = make(tokenizer)
    client_of(llm).refuse = "queue full"
    assert [o.error for o in llm.generate(["a", "b"], use_tqdm=False)] == ["queue full"] * 2
    client_of(llm).refuse = None
    assert llm.generate("a", use_tqdm=False)[0].error is None


def test_ctrl_c_aborts_and_leaves_the_engine_usable(tokenizer: Tokenizer) -> None:
    llm = make(tokenizer, max_model_len=10_000)
    client, steps = client_of(llm), itertools.count()
    poll = client.poll

    def poll_and_interrupt(timeout: float | None = None) -> Any:
        outputs = poll(timeout)
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return outputs

    client.poll = poll_and_interrupt  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGINT)
    endless = SamplingParams(max_tokens=None, ignore_eos=True, n=2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], endless, use_tqdm=False)
    assert len(client.aborted) == 4
    assert not client.running
    assert client.num_steps == 4
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_what_is_queued_runs_beside_others_and_is_had_in_order(tokenizer: Tokenizer) -> None:
    llm = make(tokenizer)
    assert llm.wait_for_completion() == []
    long, short = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (30, 2))
    ids = llm.enqueue(["a", "b"], [long, short]) + llm.enqueue([5, 6], short)
    assert len(set(ids)) == 3
    assert llm.generate("c", SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)[0].finished
    with pytest.raises(ValueError, match="output_type"):
        llm.wait_for_completion(str)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.prompt for output in outputs] == ["a", "b", None]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30, 2, 2]
    assert llm.wait_for_completion() == []
    with pytest.raises(ValueError, match="temperature"):
        llm.enqueue(["a", "b"], [long, SamplingParams(temperature=-1)])


def test_ctrl_c_while_waiting_aborts_what_was_queued(tokenizer: Tokenizer) -> None:
    llm = make(tokenizer, max_model_len=10_000)
    client = client_of(llm)
    poll = client.poll

    def poll_and_interrupt(timeout: float | None = None) -> Any:
        signal.raise_signal(signal.SIGINT)
        return poll(timeout)

    llm.enqueue(["a", "b"], SamplingParams(max_tokens=None, ignore_eos=True))
    client.poll = poll_and_interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.wait_for_completion(use_tqdm=False)
    assert not client.running


def test_names_that_scripts_use(tokenizer: Tokenizer) -> None:
    llm = make(tokenizer)
    assert llm.get_world_size() == llm.get_world_size(include_dp=False) == 1
    assert llm.runner_type == "generate"
    assert llm.supported_tasks == ("generate",)
    assert llm.model_config is llm.llm_engine.model_config


@pytest.mark.parametrize("kind", [LLM, LLMEngine, AsyncLLM])
@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_names_of_other_engines_say_what_to_use(kind: Any, name: str) -> None:
    engine = kind.__new__(kind)
    assert not hasattr(engine, name)
    with pytest.raises(AttributeError, match=re.escape(INSTEAD[name])):
        getattr(engine, name)
    with pytest.raises(AttributeError, match=r"'no_such_name'$"):
        engine.no_such_name  # noqa: B018


def test_a_dead_engine_says_so(tokenizer: Tokenizer) -> None:
    llm = make(tokenizer)
    client_of(llm).die("killed")
    with pytest.raises(EngineDeadError, match="killed"):
        llm.generate("a", use_tqdm=False)


def test_progress(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make(tokenizer)
    llm.generate(["a", "b"], use_tqdm=True)
    shown = capsys.readouterr()
    assert "Processed prompts" in shown.err
    assert "tok/s" in shown.err
    assert shown.out == ""
    llm.generate("a", use_tqdm=False)
    assert capsys.readouterr().err == ""
    bars = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            self.total, self.desc, self.count, self.closed, self.postfix = total, desc, 0, False, ""
            bars.append(self)

        def update(self, count: int) -> None:
            self.count += count

        def close(self) -> None:
            self.closed = True

    llm.generate(["a", "b"], use_tqdm=Bar)
    assert (bars[0].total, bars[0].desc, bars[0].count, bars[0].closed) == (2, "Processed prompts", 2, True)
    assert "output" in bars[0].postfix


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM("x", max_model_lne=4)
    with pytest.raises(ConfigError, match="does not exist"):
        LLM(str(tmp_path / "missing"))
    assert quire.LLM is LLM


def test_context_manager_shuts_down(tokenizer: Tokenizer) -> None:
    with make(tokenizer) as llm:
        assert llm.call("check", 1) == {"method": "check", "args": [1]}
    assert client_of(llm).is_shut_down


# Beam search


def score(cumulative: float, length: int, penalty: float) -> float:
    return cumulative / max(length, 1) ** penalty


def exhaustive(
    prompt: list[int], vocab: int, depth: int, eos: int | None, penalty: float
) -> list[tuple[float, list[int]]]:
    """Every possible answer with its score, best first: ended by EOS (cut off), or `depth` tokens long."""
    found = []
    frontier: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(depth):
        grown = []
        for tokens, cumulative in frontier:
            for token, logprob in enumerate(log_softmax([*prompt, *tokens], vocab).tolist()):
                if token == eos:
                    found.append((score(cumulative + logprob, len(tokens) + 1, penalty), tokens))
                else:
                    grown.append(([*tokens, token], cumulative + logprob))
        frontier = grown
    found += [(score(cumulative, depth, penalty), tokens) for tokens, cumulative in frontier]
    return sorted(found, reverse=True)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize(("vocab", "depth", "width"), [(3, 3, 27), (4, 2, 16), (2, 5, 32)])
def test_a_beam_wide_enough_finds_the_best_of_all(
    vocab: int, depth: int, width: int, penalty: float, ignore_eos: bool
) -> None:
    llm = make(None, vocab_size=vocab, max_logprobs=-1, eos=(1,))
    params = BeamSearchParams(beam_width=width, max_tokens=depth, length_penalty=penalty, ignore_eos=ignore_eos)
    prompts = [[0, 1, 0], [1]]
    for prompt, result in zip(prompts, llm.beam_search(prompts, params, concurrency_limit=1), strict=True):
        expected = exhaustive(prompt, vocab, depth, None if ignore_eos else 1, penalty)[:width]
        assert [s.tokens for s in result.sequences] == [prompt + tokens for _, tokens in expected]
        for sequence, (value, tokens) in zip(result.sequences, expected, strict=True):
            length = len(tokens) + (sequence.finish_reason == "stop")
            assert math.isclose(score(sequence.cum_logprob, length, penalty), value, rel_tol=1e-9)
            assert sequence.orig_prompt == prompt


def by_matrix(prompt: list[int], vocab: int, width: int, depth: int, eos: int) -> list[list[int]]:
    """Beam search said differently: all (beam, token) scores of a step in one matrix; it never stops early."""
    live, totals, done = [[]], np.zeros(1), []  # type: ignore[var-annotated]
    for step in range(1, depth + 1):
        steps = totals[:, None] + np.stack([log_softmax([*prompt, *tokens], vocab) for tokens in live])
        grown = []
        for rank, place in enumerate(np.argsort(-steps, axis=None)[: 2 * width]):
            beam, token = divmod(int(place), vocab)
            value = steps[beam, token]
            if token != eos and step < depth:
                grown.append((value, [*live[beam], token]))
            elif rank < width:
                done.append((value / step, live[beam] if token == eos else [*live[beam], token]))
        live, totals = [t for _, t in grown[:width]], np.array([v for v, _ in grown[:width]])
    return [tokens for _, tokens in sorted(done, key=lambda pair: -pair[0])[:width]]


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("prompt", [[3], [4, 5], [6, 7, 8]])
def test_narrow_beams_equal_a_plain_implementation(width: int, prompt: list[int]) -> None:
    llm = make(None, vocab_size=30, eos=(2,))
    (result,) = llm.beam_search([prompt], BeamSearchParams(beam_width=width, max_tokens=6, early_stopping="never"))
    assert [s.tokens[len(prompt) :] for s in result.sequences] == by_matrix(prompt, 30, width, 6, 2)
    reasons = {s.finish_reason for s in result.sequences}
    assert reasons <= {"stop", "length"}


def test_beam_search_text_and_limits(tokenizer: Tokenizer) -> None:
    llm = make(tokenizer, max_model_len=8)
    (result,) = llm.beam_search("Hello", BeamSearchParams(beam_width=2, max_tokens=100), use_tqdm=True)
    prompt_ids = tokenizer.encode("Hello")
    for sequence in result.sequences:
        assert sequence.orig_prompt == "Hello"
        assert sequence.tokens[: len(prompt_ids)] == prompt_ids
        assert sequence.text == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        assert len(sequence.tokens) <= 8
        assert len(sequence.logprobs) == len(sequence.tokens) - len(prompt_ids) + (sequence.finish_reason == "stop")
    with pytest.raises(InputError, match="max_logprobs=22"):
        llm.beam_search("Hello", BeamSearchParams(beam_width=11, max_tokens=1))


def test_beam_search_can_keep_the_eos() -> None:
    llm = make(None, vocab_size=3, max_logprobs=-1, eos=(1,))
    cut, kept = (
        llm.beam_search([[0]], BeamSearchParams(beam_width=9, max_tokens=2, include_stop_str_in_output=keep))[0]
        for keep in (False, True)
    )
    for a, b in zip(cut.sequences, kept.sequences, strict=True):
        assert b.tokens == ([*a.tokens, 1] if a.finish_reason == "stop" else a.tokens)
        assert b.stop_reason == (1 if a.finish_reason == "stop" else None)


def test_a_text_that_its_length_proves_too_long_is_never_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_args: Any, **_kwargs: Any) -> list[list[int]]:
        raise AssertionError("was encoded")

    llm = make(tokenizer)
    assert tokenizer.most_characters is not None
    most = tokenizer.most_characters * (llm.info.max_model_len - 1)
    assert llm.generate("a" * 20, SamplingParams(max_tokens=1))
    monkeypatch.setattr(Tokenizer, "encode_batch", encode)
    for prompts in ("a" * 30_000_000, ["short", "a" * (most + 1)]):
        with pytest.raises(ContextLengthError, match="the prompt is too long"):
            llm.generate(prompts, SamplingParams(max_tokens=1))
    with pytest.raises(AssertionError, match="was encoded"):
        llm.generate("a" * most)
