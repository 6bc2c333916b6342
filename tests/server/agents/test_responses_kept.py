"""Responses that are kept: chains, background, cancelling, deleting, pages of items, and their limits."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from quire.server.responses.store import ResponseStore, Stored
from tests.server.agents.conftest import MODEL
from tests.server.agents.dictated_llm import DictatedLLM, say
from tests.server.agents.scripts import LOOK, SUM
from tests.server.agents.test_responses import TOOLS
from tests.server.conftest import Served, echo_server
from tests.server.process import server_process


def test_a_chain_of_turns(oai: openai.OpenAI, llm: DictatedLLM) -> None:
    first = oai.responses.create(model=MODEL, input=say("one"), instructions="A")
    second = oai.responses.create(model=MODEL, input=say("two"), previous_response_id=first.id, instructions="B")
    third = oai.responses.create(model=MODEL, input=say("three"), previous_response_id=second.id)
    assert (first.output_text, second.output_text, third.output_text) == ("one", "two", "three")
    assert third.previous_response_id == second.id
    assert llm.prompts[-2].startswith("[system] B\n[user] SAY:one\n[assistant] one\n[user] SAY:two")
    assert llm.prompts[-1] == (
        "[user] SAY:one\n[assistant] one\n[user] SAY:two\n[assistant] two\n[user] SAY:three\n[assistant] "
    )
    oai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        oai.responses.retrieve(first.id)
    fourth = oai.responses.create(model=MODEL, input=say("four"), previous_response_id=third.id)
    assert "SAY:one" in llm.prompts[-1]
    branch = oai.responses.create(model=MODEL, input=say("other"), previous_response_id=second.id)
    assert "three" not in llm.prompts[-1]
    assert {fourth.output_text, branch.output_text} == {"four", "other"}


def test_a_loop_of_calls(oai: openai.OpenAI, llm: DictatedLLM) -> None:
    """Two calls at once, their outputs in the other order, then the answer."""
    first = oai.responses.create(model=MODEL, input=say(f"{LOOK}\n{SUM}"), tools=TOOLS)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["look", "add"]
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": calls[1].call_id, "output": "3"},
        {
            "type": "function_call_output",
            "call_id": calls[0].call_id,
            "output": [{"type": "input_text", "text": say("found it")}],
        },
    ]
    chained = oai.responses.create(model=MODEL, input=outputs, previous_response_id=first.id, tools=TOOLS)
    assert chained.output_text == "found it"
    asked = {"role": "user", "content": say(f"{LOOK}\n{SUM}")}
    items: list[Any] = [asked, *[item.model_dump() for item in first.output], *outputs]
    stateless = oai.responses.create(model=MODEL, input=items, tools=TOOLS, store=False)
    assert stateless.output_text == "found it"
    assert llm.prompts[-1] == llm.prompts[-2]
    assert f"[call {calls[0].call_id} look" in llm.prompts[-1]
    with pytest.raises(openai.BadRequestError, match="call_nowhere"):
        oai.responses.create(
            model=MODEL, input=[asked, {"type": "function_call_output", "call_id": "call_nowhere", "output": "x"}]
        )


def test_store_false_leaves_nothing(oai: openai.OpenAI) -> None:
    reply = oai.responses.create(model=MODEL, input=say("x"), store=False)
    for refused in (
        lambda: oai.responses.retrieve(reply.id),
        lambda: oai.responses.create(model=MODEL, input="x", previous_response_id=reply.id),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            refused()
        assert error.value.type == "invalid_request_error"


def test_streamed_responses_are_kept_before_the_client_hears_of_it(oai: openai.OpenAI) -> None:
    for event in oai.responses.create(model=MODEL, input=say("streamed"), stream=True):
        if event.type == "response.completed":
            kept = oai.responses.retrieve(event.response.id)
            assert kept.output_text == "streamed"
            assert kept == event.response


def test_items_by_reference(oai: openai.OpenAI, llm: DictatedLLM) -> None:
    reply = oai.responses.create(model=MODEL, input=say("remember"))
    reference: Any = {"type": "item_reference", "id": reply.output[0].id}
    oai.responses.create(model=MODEL, input=[reference, {"role": "user", "content": say("x")}])
    assert llm.prompts[-1].startswith("[assistant] remember\n")
    with pytest.raises(openai.BadRequestError, match="not stored"):
        oai.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_nowhere"}])


def test_pages_of_input_items(oai: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": f"number {i}"} for i in range(5)]
    reply = oai.responses.create(model=MODEL, input=[*asked, {"role": "user", "content": say("x")}])
    page = oai.responses.input_items.list(reply.id, limit=2)
    assert page.has_more
    texts = [item.content[0].text for item in oai.responses.input_items.list(reply.id, limit=2)]  # type: ignore
    assert texts == [say("x"), *[f"number {i}" for i in reversed(range(5))]]
    ascending = oai.responses.input_items.list(reply.id, order="asc", limit=100)
    assert ascending.data[0].content[0].text == "number 0"  # type: ignore
    assert not ascending.has_more
    for bad in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"limit": "x"}):
        with pytest.raises(openai.BadRequestError):
            oai.responses.input_items.list(reply.id, **bad)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError):
        oai.responses.input_items.list(reply.id, after="msg_nowhere")


def wait_for(oai: openai.OpenAI, response_id: str, *states: str) -> Any:
    for _ in range(500):
        reply = oai.responses.retrieve(response_id)
        if reply.status in states:
            return reply
        threading.Event().wait(0.01)
    raise AssertionError(f"still {reply.status}")


def test_background(oai: openai.OpenAI, llm: DictatedLLM) -> None:
    llm.delay = 0.002
    reply = oai.responses.create(model=MODEL, input=say("0123456789" * 5), background=True)
    assert (reply.status, reply.background, reply.output) == ("queued", True, [])
    with pytest.raises(openai.BadRequestError, match="still being made"):
        oai.responses.create(model=MODEL, input="x", previous_response_id=reply.id)
    followed = list(oai.responses.retrieve(reply.id, stream=True))  # while it is made
    done = wait_for(oai, reply.id, "completed")
    assert done.output_text == "0123456789" * 5
    assert [event.sequence_number for event in followed] == list(range(len(followed)))
    assert [event.type for event in followed[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert followed[-1].type == "response.completed"
    assert followed[-1].response == done
    again = list(oai.responses.retrieve(reply.id, stream=True, starting_after=9))
    assert again == followed[10:]
    assert list(oai.responses.retrieve(reply.id, stream=True, starting_after=10_000)) == []
    assert oai.responses.create(model=MODEL, input=say("x"), previous_response_id=reply.id).output_text == "x"
    with pytest.raises(openai.BadRequestError, match="completed"):
        oai.responses.cancel(reply.id)


def test_background_and_streamed_at_once(oai: openai.OpenAI) -> None:
    events = list(oai.responses.create(model=MODEL, input=say("Hi"), background=True, stream=True))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert oai.responses.retrieve(events[-1].response.id).output_text == "Hi"


def test_a_stream_in_the_background_goes_on_without_its_reader(served: Served, oai: openai.OpenAI) -> None:
    llm = served.llm
    llm.delay = 0.005
    with oai.responses.create(model=MODEL, input=say("x" * 60), background=True, stream=True) as stream:
        response_id = next(iter(stream)).response.id  # type: ignore[union-attr]
    llm.delay = 0.0
    assert wait_for(oai, response_id, "completed").output_text == "x" * 60


def test_cancelling_frees_the_seat(served: Served, oai: openai.OpenAI, llm: DictatedLLM) -> None:
    llm.delay = 0.01
    reply = oai.responses.create(model=MODEL, input=say("0123456789" * 20), background=True)
    assert served.wait_until(lambda: bool(llm.running))
    cancelled = oai.responses.cancel(reply.id)
    assert cancelled.status == "cancelled"
    assert not llm.running
    assert oai.responses.cancel(reply.id).status == "cancelled"
    assert oai.responses.retrieve(reply.id).status == "cancelled"
    assert list(oai.responses.retrieve(reply.id, stream=True))[-1].type == "response.cancelled"
    foreground = oai.responses.create(model=MODEL, input=say("x"))
    with pytest.raises(openai.BadRequestError, match="background"):
        oai.responses.cancel(foreground.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        oai.responses.retrieve(foreground.id, stream=True)
    assert served.wait_until(lambda: served.service.in_flight.num_answers == 0)


def test_deleting_ends_what_still_runs(served: Served, oai: openai.OpenAI, llm: DictatedLLM) -> None:
    llm.frozen = True
    reply = oai.responses.create(model=MODEL, input=say("x"), background=True)
    oai.responses.delete(reply.id)
    assert served.wait_until(lambda: not llm.running)
    with pytest.raises(openai.NotFoundError):
        oai.responses.retrieve(reply.id)


@pytest.mark.parametrize("cause", ["refused", "breaks"])
def test_a_failure_in_the_background(oai: openai.OpenAI, llm: DictatedLLM, cause: str) -> None:
    llm.refuse_with, llm.breaks_after = ("queue_full", None) if cause == "refused" else (None, 3)
    reply = oai.responses.create(model=MODEL, input=say("Hello"), background=True)
    failed = wait_for(oai, reply.id, "failed")
    assert failed.error.code == ("rate_limit_exceeded" if cause == "refused" else "server_error")
    assert list(oai.responses.retrieve(reply.id, stream=True))[-1].type == "response.failed"


def test_a_failure_in_a_stream(served: Served, llm: DictatedLLM) -> None:
    llm.breaks_after = 3
    response = served.client.post("/v1/responses", json={"input": say("Hello"), "stream": True})
    last = json.loads(response.text.strip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    llm.breaks_after = 0  # before the first event there is still a status to give
    assert served.client.post("/v1/responses", json={"input": say("Hello"), "stream": True}).status_code == 500


def test_a_client_that_leaves_frees_the_seat(served: Served, oai: openai.OpenAI, llm: DictatedLLM) -> None:
    llm.delay = 0.01
    with oai.responses.create(model=MODEL, input=say("x" * 300), stream=True) as stream:
        next(iter(stream))
    assert served.wait_until(lambda: not llm.running)


def test_the_id_may_be_the_clients(served: Served) -> None:
    body = {"input": say("x"), "request_id": "my-id.1"}
    assert served.client.post("/v1/responses", json=body).json()["id"] == "my-id.1"
    assert served.client.get("/v1/responses/my-id.1").json()["status"] == "completed"
    assert served.client.post("/v1/responses", json=body).status_code == 400


def test_a_server_that_keeps_nothing() -> None:
    with echo_server(DictatedLLM(served_model_name=[MODEL]), response_store_bytes=0) as served:
        reply = served.client.post("/v1/responses", json={"input": say("x")}).json()
        assert reply["status"] == "completed"
        assert served.client.get(f"/v1/responses/{reply['id']}").status_code == 404
        refused = served.client.post("/v1/responses", json={"input": say("x"), "background": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")


def test_a_shutdown_ends_what_runs_in_the_background() -> None:
    options = ["--port", "0", "--shutdown-timeout", "0.2"]
    with server_process("tests.server.echo_process", *options, ECHO_DELAY="0.05") as process:
        reply = httpx.post(f"{process.url}/v1/responses", json={"input": "x", "background": True})
        assert reply.json()["status"] == "queued"
        process.process.terminate()
        assert process.exit_code() == 0


def stored(number: int, before: Stored | None = None, size: int = 1000) -> Stored:
    output = [{"id": f"o{number}", "type": "message", "text": "x" * size}]
    asked = [{"id": f"i{number}", "type": "message", "text": "y"}]
    return Stored({"id": f"r{number}", "output": output}, asked, None if before is None else before.turn)


def keep(store: ResponseStore, one: Stored) -> Stored:
    store.open(one)
    store.settle(one)
    return one


def test_the_least_recently_used_go_first() -> None:
    store = ResponseStore(5000)
    for number in range(4):
        keep(store, stored(number))
    store.get("r0")
    keep(store, stored(4))
    assert [f"r{i}" in store for i in range(5)] == [True, False, True, True, True]
    assert store.item("o1") is None
    assert store.item("o0") is not None
    keep(store, stored(5, size=6000))
    assert (len(store), store.num_bytes) == (0, 0)


def test_an_id_that_comes_twice_is_counted_once() -> None:
    store = ResponseStore(10**6)
    keep(store, stored(0))
    size = store.num_bytes
    keep(store, stored(0))
    assert (len(store), store.num_bytes) == (1, size)


def test_turns_live_as_long_as_a_later_one_needs_them() -> None:
    store = ResponseStore(10**6)
    first = keep(store, stored(0))
    second = keep(store, stored(1, first))
    third = keep(store, stored(2, second))
    size = store.num_bytes
    store.delete(first)
    store.delete(second)
    assert store.num_bytes == size
    assert [item["id"] for item in third.turn.conversation()] == ["i0", "o0", "i1", "o1", "i2", "o2"]
    store.delete(third)
    assert store.num_bytes == 0
