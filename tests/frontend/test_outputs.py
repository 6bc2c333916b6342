"""EngineOutputs become RequestOutputs: text, tokens, log-probabilities, n answers, three kinds of output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.foundation.errors import InputError
from quire.frontend.inputs import build
from quire.frontend.outputs import OutputProcessor, RequestState
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.types.output import EngineOutput, EngineOutputs, RequestOutput
from quire.types.sampling import RequestOutputKind, SamplingParams
from tests.frontend.echo_engine import EchoClient, Script, log_softmax, make_info, says

DELTA, FINAL, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE
INFO = make_info(vocab_size=500)


def run(
    tokenizer: Tokenizer | None,
    params: SamplingParams,
    script: Script | None = None,
    *,
    prompt: Any = (5, 6, 7),
    tokens_a_poll: int = 1,
    read_every: int = 1,
) -> tuple[list[RequestOutput], EchoClient]:
    """All outputs of one request, read after every `read_every` steps, and the engine afterwards."""
    client = EchoClient(INFO, script, tokens_a_poll)
    processor = OutputProcessor(tokenizer)
    requests = build(prompt, params, INFO, tokenizer, request_id="r")
    request_state = processor.add(requests, "r", None)
    for request in requests:
        client.add(request)
    outputs: list[RequestOutput] = []
    steps = 0
    while not (outputs and outputs[-1].finished):
        _, aborts = processor.process(client.poll())
        client.abort(aborts)
        steps += 1
        if (steps % read_every == 0 or request_state.finished) and request_state.has_news():
            outputs.append(request_state.take())
        assert steps < 500
    assert len(processor) == 0
    return outputs, client


def text_of(outputs: Sequence[RequestOutput], kind: RequestOutputKind, index: int = 0) -> str:
    answers = [a for o in outputs for a in o.outputs if a.index == index]
    return "".join(a.text for a in answers) if kind == DELTA else answers[-1].text


def tokens_of(outputs: Sequence[RequestOutput], kind: RequestOutputKind, index: int = 0) -> list[int]:
    answers = [a for o in outputs for a in o.outputs if a.index == index]
    return [t for a in answers for t in a.token_ids] if kind == DELTA else answers[-1].token_ids


ANSWER = "The 👩‍👩‍👧‍👦 says: 你好\n\nUser: stop"


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("tokens_a_poll", [1, 3, 100])
@pytest.mark.parametrize("read_every", [1, 4, 1000])
@pytest.mark.parametrize("stop", [[], ["\n\nUser:"], ["好\n"]])
def test_kinds_and_slow_readers_agree(
    tokenizer: Tokenizer, kind: RequestOutputKind, tokens_a_poll: int, read_every: int, stop: list[str]
) -> None:
    ids = tokenizer.encode(ANSWER)
    params = SamplingParams(max_tokens=None, stop=stop, output_kind=kind)
    outputs, client = run(tokenizer, params, says(ids), tokens_a_poll=tokens_a_poll, read_every=read_every)
    last = outputs[-1].outputs[-1]
    expected = ANSWER.split(stop[0])[0] if stop else ANSWER
    assert text_of(outputs, kind) == expected
    assert last.finish_reason == "stop"
    assert last.stop_reason == (stop[0] if stop else None)
    tokens = tokens_of(outputs, kind)
    if stop:
        assert tokens == ids[: len(tokens)]
        assert tokenizer.decode(tokens[:-1]).count(stop[0]) == 0
        assert tokenizer.decode(tokens).count(stop[0]) == 1
        finished_by_itself = tokens_a_poll == 100  # EOS was in the same step
        assert client.aborted == ([] if finished_by_itself else ["r"])
    else:
        assert tokens == [*ids, 0]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize(
    ("fields", "then", "text", "stop_reason"),
    [
        ({}, 0, "ab", None),
        ({"skip_special_tokens": False}, 0, "ab", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, 0, "ab<|end|>", None),
        ({"stop_token_ids": [2]}, 2, "ab", 2),
        ({"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 4}, 0, "ab<|end|><|end|>", None),
    ],
)
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_stop_tokens_are_in_the_ids_but_not_in_the_text(
    tokenizer: Tokenizer, kind: RequestOutputKind, fields: dict[str, Any], then: int, text: str, stop_reason: Any
) -> None:
    ids = [*tokenizer.encode("a"), *tokenizer.encode("b")]
    outputs, _ = run(tokenizer, SamplingParams(output_kind=kind, **fields), says(ids, then))
    assert text_of(outputs, kind) == text
    assert tokens_of(outputs, kind)[:3] == [*ids, then]
    assert outputs[-1].outputs[0].stop_reason == stop_reason
    assert outputs[-1].outputs[0].finish_reason == ("length" if fields.get("ignore_eos") else "stop")


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_unfinished_character_at_the_end_of_the_length(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    ids = tokenizer.encode("a🦄")
    outputs, _ = run(tokenizer, SamplingParams(max_tokens=len(ids) - 1, output_kind=kind), says(ids))
    assert text_of(outputs, kind) == "a\ufffd"
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_without_text(tokenizer: Tokenizer) -> None:
    for some in (tokenizer, None):
        outputs, _ = run(some, SamplingParams(detokenize=False, max_tokens=3, temperature=0))
        assert outputs[-1].outputs[0].text == ""
        assert len(outputs[-1].outputs[0].token_ids) == 3


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_log_probabilities(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    ids = tokenizer.encode(" the world")
    params = SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=len(ids), output_kind=kind)
    outputs, _ = run(tokenizer, params, says(ids))
    answers = [o.outputs[0] for o in outputs]
    found = [entry for a in answers for entry in a.logprobs] if kind == DELTA else answers[-1].logprobs
    assert found is not None
    assert len(found) == len(ids)
    history, total = [5, 6, 7], 0.0
    for token, entry in zip(ids, found, strict=True):
        logits = log_softmax(history, 500)
        assert next(iter(entry)) == token
        assert entry[token].rank == 1 + sum(logits > logits[token])
        assert entry[token].decoded_token == tokenizer.token_text(token)
        assert {e.rank for e in entry.values()} >= {1, 2}
        assert all(math.isclose(e.logprob, logits[t], abs_tol=1e-9) for t, e in entry.items())
        total += logits[token]
        history.append(token)
    assert math.isclose(answers[-1].cumulative_logprob or 0.0, total, abs_tol=1e-6)
    prompts = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert len(prompts) == (1 if kind == DELTA else len(outputs))
    assert prompts[0][0] is None
    assert [next(iter(entry)) for entry in prompts[0][1:]] == [6, 7]


def test_no_log_probabilities_unless_asked(tokenizer: Tokenizer) -> None:
    outputs, _ = run(tokenizer, SamplingParams(max_tokens=2, temperature=0))
    assert outputs[-1].outputs[0].logprobs is None
    assert outputs[-1].outputs[0].cumulative_logprob is None
    assert outputs[-1].prompt_logprobs is None


def test_log_probabilities_end_with_the_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four")
    params = SamplingParams(logprobs=0, stop=" two", max_tokens=None)
    outputs, _ = run(tokenizer, params, says(ids), tokens_a_poll=100)
    answer = outputs[-1].outputs[0]
    assert answer.text == "one"
    assert len(answer.logprobs or []) == len(answer.token_ids)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_n_answers_finish_together(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    texts = ["a", "some more words here", "", "stop now please"]
    by_id = {f"r#{i}": tokenizer.encode(t) for i, t in enumerate(texts)}

    def script(request: Any, made: int) -> int:
        ids = by_id[request.id]
        return ids[made] if made < len(ids) else 0

    params = SamplingParams(n=4, stop=" please", max_tokens=None, output_kind=kind)
    outputs, client = run(tokenizer, params, script)
    assert [text_of(outputs, kind, i) for i in range(4)] == [t.removesuffix(" please") for t in texts]
    assert client.aborted == ["r#3"]
    assert {o.request_id for o in outputs} == {"r"}
    if kind == DELTA:
        ends = [a.index for o in outputs for a in o.outputs if a.finished()]
        assert sorted(ends) == [0, 1, 2, 3], "each answer ends once"
    else:
        assert all([a.index for a in o.outputs] == [0, 1, 2, 3] for o in outputs)
    assert len(outputs) == 1 if kind == FINAL else len(outputs) > 1


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=20), stop=st.text("ab e世", min_size=1, max_size=2), tokens=st.integers(1, 5))
def test_deltas_add_up(tokenizer: Tokenizer, text: str, stop: str, tokens: int) -> None:
    ids = tokenizer.encode(text)[:100]
    results = []
    for kind, chunk in ((DELTA, 1), (FINAL, tokens), (DELTA, tokens)):
        params = SamplingParams(max_tokens=None, stop=stop, output_kind=kind)
        outputs, _ = run(tokenizer, params, says(ids), tokens_a_poll=chunk)
        end = outputs[-1].outputs[0]
        results.append((text_of(outputs, kind), tokens_of(outputs, kind), end.finish_reason, end.stop_reason))
    assert results[0] == results[1] == results[2]


def test_metrics_and_cached_tokens(tokenizer: Tokenizer) -> None:
    outputs, _ = run(tokenizer, SamplingParams(max_tokens=2, temperature=0))
    metrics, last = outputs[-1].metrics, outputs[-1]
    assert metrics is not None
    assert metrics.first_scheduled_time == metrics.arrival_time + 0.5
    assert metrics.arrival_time <= (metrics.first_token_time or 0) <= (metrics.finished_time or 0)
    assert last.num_cached_tokens == 3
    assert last.prompt_token_ids == [5, 6, 7]


def test_a_refused_request_ends_with_its_message(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    requests = build([1], SamplingParams(n=2), INFO, tokenizer, request_id="r")
    request_state = processor.add(requests, "r", None)
    refusals = [EngineOutput(request_id=r.id, finish_reason="error", error="queue full") for r in requests]
    processor.process(EngineOutputs(special=refusals))
    output = request_state.take()
    assert (output.finished, output.error) == (True, "queue full")
    assert [a.finish_reason for a in output.outputs] == ["error", "error"]


def two_running(tokenizer: Tokenizer) -> tuple[OutputProcessor, RequestState]:
    processor = OutputProcessor(tokenizer)
    requests = build([1], SamplingParams(n=2), INFO, tokenizer, request_id="r")
    request_state = processor.add(requests, "r", None)
    return processor, request_state


def test_abort_ends_what_is_running(tokenizer: Tokenizer) -> None:
    processor, request_state = two_running(tokenizer)
    (token,) = tokenizer.encode("a")
    processor.process(
        EngineOutputs(special=[EngineOutput(request_id="r#0", token_ids=[token], finish_reason="length")])
    )
    assert processor.abort("r") == (request_state, ["r#1"])
    assert processor.abort("r") == (None, [])
    output = request_state.take()
    assert [a.finish_reason for a in output.outputs] == ["length", "abort"]
    assert output.finished
    assert processor.process(EngineOutputs(ids=["r#1"], tokens=[token])) == ([], [])


def test_ids_in_use_are_refused_and_free_again_afterwards(tokenizer: Tokenizer) -> None:
    processor, _ = two_running(tokenizer)
    for taken in ("r", "r#1"):
        requests = build([1], SamplingParams(), INFO, tokenizer, request_id=taken)
        with pytest.raises(InputError, match="in use"):
            processor.add(requests, taken, None)
    processor.abort("r")
    two_again = build([1], SamplingParams(n=2), INFO, tokenizer, request_id="r")
    assert processor.add(two_again, "r", None).running_ids == ["r#0", "r#1"]


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("lacks_stop_token", [True, False])
def test_an_answer_that_its_grammar_ends_keeps_its_last_token(
    tokenizer: Tokenizer, kind: RequestOutputKind, lacks_stop_token: bool
) -> None:
    ids = tokenizer.encode("[1, 2]")
    processor = OutputProcessor(tokenizer)
    requests = build((5, 6), SamplingParams(max_tokens=20, output_kind=kind), INFO, tokenizer, request_id="r")
    request_state = processor.add(requests, "r", None)
    last = EngineOutput(
        request_id=requests[0].id,
        token_ids=ids if lacks_stop_token else [*ids, 0],
        finish_reason="stop",
        lacks_stop_token=lacks_stop_token,
    )
    processor.process(EngineOutputs(special=[last]))
    output = request_state.take()
    assert (output.finished, output.outputs[0].text) == (True, "[1, 2]")
    assert output.outputs[0].finish_reason == "stop"


def test_a_step_may_bring_several_tokens_of_each(tokenizer: Tokenizer) -> None:
    """A stop string within them ends the answer there; whoever was aborted meanwhile is passed over."""
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(max_tokens=50, stop=["lo"], output_kind=DELTA)
    for name in ("a", "b"):
        processor.add(build((5, 6, 7), params, INFO, tokenizer, request_id=name), name, None)
    ids = tokenizer.encode("Hel"), tokenizer.encode("Hello, hello")
    news = EngineOutputs(ids=["a", "gone", "b"], tokens=[*ids[0], 9, 9, *ids[1]], counts=[len(ids[0]), 2, len(ids[1])])
    changed, aborts = processor.process(news)
    assert [request_state.request_id for request_state in changed] == ["a", "b"]
    assert aborts == ["b"]
    a, b = (request_state.take().outputs[0] for request_state in changed)
    assert (b.text, b.finish_reason, b.stop_reason) == ("Hel", "stop", "lo")
    assert len(b.token_ids) < len(ids[1])
    assert (a.token_ids, a.finish_reason) == (ids[0], None)
    assert len(processor) == 1
