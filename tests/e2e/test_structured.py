"""Real grammars on the demo model: what comes out fits, and is the same however the work is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from quire import LLM
from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.engine.client import EngineClient, InProcessClient, ProcessClient
from quire.frontend.structured import grammar_of
from quire.frontend.tokenization.tokenizer import Tokenizer, load_tokenizer
from quire.types.output import INVALID_REQUEST, EngineOutput
from quire.types.request import EngineRequest, token_array
from quire.types.sampling import RequestOutputKind, SamplingParams
from quire.types.structured import Constraint, GrammarSpec, StructuredOutputsParams, Thinking

TOKENS = 60
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 200}  # a cache that is quickly made
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def fits_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


KINDS: list[tuple[StructuredOutputsParams | None, Callable[[str], Any]]] = [
    (StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), fits_schema),
    (StructuredOutputsParams(regex=r"[a-c]{3}-\d{2,4}"), lambda text: re.fullmatch(r"[a-c]{3}-\d{2,4}", text)),
    (None, lambda _: True),
    (StructuredOutputsParams(choice=["yes", "no", "maybe not"]), lambda text: text in ("yes", "no", "maybe not")),
    (StructuredOutputsParams(grammar='root ::= "(" root ")" | "x"'), lambda text: re.fullmatch(r"\(*x\)*", text)),
]


def make(name: str, tokenizer: Tokenizer, constraint: Constraint | None, **params: Any) -> EngineRequest:
    sampling = SamplingParams(**{"temperature": 1.0, "seed": len(name), "max_tokens": TOKENS, **params})
    eos = tokenizer.eos_token_id
    assert eos is not None
    return EngineRequest(
        id=name, token_ids=token_array(tokenizer.encode(f"Question {name}:")), params=sampling,
        max_tokens=sampling.max_tokens or 1,
        stop_token_ids=[eos], eos_token_id=eos, seed=hash(name) if sampling.seed is None else sampling.seed,
        constraint=constraint,
    )  # fmt: skip


def all_kinds(tokenizer: Tokenizer, copies: int = 2) -> list[EngineRequest]:
    """Each kind some times, as the answers of n > 1 are: the same grammar, other seeds."""
    return [
        make(
            f"{kind}#{copy}", tokenizer, None if asked is None else Constraint(grammar_of(asked)), seed=7 * kind + copy
        )
        for kind, (asked, _) in enumerate(KINDS)
        for copy in range(copies)
    ]


def start(kind: type = InProcessClient, **options: Any) -> EngineClient:
    client: EngineClient = kind(
        resolve(EngineConfig.from_flat(**{"device": "cpu", "num_threads": 1, "dtype": "float32", **SMALL, **options}))
    )
    return client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(resolve(EngineConfig.from_flat(device="cpu")))
    assert found is not None
    return found


def answers(client: EngineClient, wanted: list[EngineRequest]) -> dict[str, tuple[list[int], EngineOutput]]:
    """Tokens, and the last output."""
    for request in wanted:
        client.add(request)
    ids: dict[str, list[int]] = {request.id: [] for request in wanted}
    last: dict[str, EngineOutput] = {}
    while len(last) < len(wanted):
        for output in client.poll(60).each():
            ids[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                last[output.request_id] = output
    return {name: (ids[name], last[name]) for name in ids}


def texts(tokenizer: Tokenizer, found: dict[str, tuple[list[int], EngineOutput]]) -> dict[str, tuple[str, str | None]]:
    return {
        name: (tokenizer.decode(ids, skip_special_tokens=True), last.finish_reason)
        for name, (ids, last) in found.items()
    }


@pytest.fixture(scope="module")
def alone(tokenizer: Tokenizer) -> dict[str, tuple[str, str | None]]:
    """One after the other, at depth 1."""
    client, found = start(), {}
    for request in all_kinds(tokenizer):
        found.update(answers(client, [request]))
    client.shutdown()
    return texts(tokenizer, found)


def test_what_is_finished_fits(alone: dict[str, tuple[str, str | None]]) -> None:
    finished = {name: text for name, (text, reason) in alone.items() if reason == "stop"}
    assert len(finished) >= 6
    for name, text in finished.items():
        assert KINDS[int(name.partition("#")[0])][1](text), (name, text)


CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "depth 1": (InProcessClient, {}),
    "depth 2": (InProcessClient, {"async_scheduling": True}),
    "a preemption at every step": (InProcessClient, {"preempt_every_step": True, "async_scheduling": True}),
    "processes": (ProcessClient, {"distributed_executor_backend": "mp", "max_num_seqs": 4, "max_prefill_chunk": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_together_as_alone(tokenizer: Tokenizer, alone: dict[str, tuple[str, str | None]], case: str) -> None:
    client_type, options = CASES[case]
    client = start(client_type, **options)
    try:
        assert texts(tokenizer, answers(client, all_kinds(tokenizer))) == alone
        client.call("check")
    finally:
        client.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_what_is_finished_fits_on_a_gpu(tokenizer: Tokenizer, options: dict[str, Any]) -> None:
    client = InProcessClient(resolve(EngineConfig.from_flat(device="cuda", **options)))
    try:
        found = texts(tokenizer, answers(client, all_kinds(tokenizer, 12)))
    finally:
        client.shutdown()
    finished = {name: text for name, (text, reason) in found.items() if reason == "stop"}
    assert len(finished) >= 32
    for name, text in finished.items():
        assert KINDS[int(name.partition("#")[0])][1](text), (name, text)


def test_a_thinking_of_bounded_length_before_the_answer(tokenizer: Tokenizer) -> None:
    """The marker has several tokens here."""
    end = tokenizer.encode("\n</think>\n", add_special_tokens=False)
    assert len(end) > 1
    grammar = grammar_of(StructuredOutputsParams(choice=["yes", "no"]))
    client = start(async_scheduling=True)
    wanted = [
        make(f"{budget}", tokenizer, Constraint(grammar, Thinking(end=end, max_tokens=budget)), ignore_eos=True)
        for budget in (0, 1, 17)
    ]
    wanted = [EngineRequest(**{f: getattr(r, f) for f in r.__struct_fields__} | {"stop_token_ids": []}) for r in wanted]
    found = answers(client, wanted)
    client.shutdown()
    for budget in (0, 1, 17):
        ids, last = found[f"{budget}"]
        assert ids[budget : budget + len(end)] == end
        assert tokenizer.decode(ids[budget + len(end) :]) in ("yes", "no")
        assert (last.finish_reason, last.lacks_stop_token) == ("stop", True)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_several_answers_as_text(kind: RequestOutputKind) -> None:
    """Offline: the text holds all of a complete answer, whether it is decoded at once or at the end."""
    wish = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    params = SamplingParams(n=3, max_tokens=TOKENS, seed=3, structured_outputs=wish, output_kind=kind, logprobs=1)
    with LLM(device="cpu", num_threads=1, dtype="float32") as llm:
        (output,) = llm.generate("A robot", params, use_tqdm=False)
    assert len({answer.text for answer in output.outputs}) > 1
    for answer in output.outputs:
        assert len(answer.logprobs or []) == len(answer.token_ids)
        if answer.finish_reason == "stop":
            assert fits_schema(answer.text)
    assert any(answer.finish_reason == "stop" for answer in output.outputs)


@pytest.mark.parametrize("preempt", [False, True])
def test_an_answer_near_its_limit_is_closed(tokenizer: Tokenizer, preempt: bool) -> None:
    grammar = grammar_of(StructuredOutputsParams(json_object=True))
    client = start(async_scheduling=True, preempt_every_step=preempt, max_num_seqs=4)
    limits = (4, 7, 12, 20, 33)
    wanted = [
        make(f"{limit}-{closes}", tokenizer, Constraint(grammar, close_at_limit=closes), seed=limit, max_tokens=limit)
        for limit in limits
        for closes in (True, False)
    ]
    found = texts(tokenizer, answers(client, wanted))
    client.shutdown()
    assert any(reason == "length" for name, (_, reason) in found.items() if name.endswith("False"))
    for limit in limits:
        text, reason = found[f"{limit}-True"]
        assert isinstance(json.loads(text), dict), text
        assert reason == "stop"  # even if the last token completes it


@pytest.mark.parametrize("client_type", [InProcessClient, ProcessClient])
def test_a_grammar_that_cannot_be_is_refused_alone(tokenizer: Tokenizer, client_type: type) -> None:
    client = start(client_type)
    wrong = GrammarSpec("ebnf", "root ::= nobody")
    fine = Constraint(grammar_of(StructuredOutputsParams(choice=["a", "b"])))
    wanted = [make("wrong", tokenizer, Constraint(wrong)), make("fine", tokenizer, fine), make("free", tokenizer, None)]
    try:
        found = answers(client, wanted)
    finally:
        client.shutdown()
    last = found["wrong"][1]
    assert (found["wrong"][0], last.finish_reason, last.stop_reason) == ([], "error", INVALID_REQUEST)
    assert last.error
    assert tokenizer.decode(found["fine"][0]) in ("a", "b")
    assert found["free"][1].finish_reason in ("stop", "length")


def test_aborts_at_any_time(tokenizer: Tokenizer) -> None:
    client = start(async_scheduling=True)
    wanted = all_kinds(tokenizer)
    for number, request in enumerate(wanted):
        client.add(request)
        client.poll(0)
        if number % 2:
            client.abort([wanted[number // 2].id])
    client.abort([request.id for request in wanted])
    again = [make("again", tokenizer, Constraint(grammar_of(StructuredOutputsParams(choice=["a"]))))]
    assert tokenizer.decode(answers(client, again)["again"][0]) == "a"
    client.call("check")
    assert client.call("stats").get("num_seats_used", 0) == 0
    client.shutdown()
