"""A conversation is compacted, and goes on from what is left of it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from quire.server.generate.sealed import unseal
from tests.server.agents.conftest import MODEL
from tests.server.agents.dictated_llm import DictatedLLM, say
from tests.server.agents.scripts import THOUGHT
from tests.server.conftest import Served, echo_server

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": say(THOUGHT + "It is about ducks.")}
ITEMS: list[Any] = [
    {"role": "developer", "content": "Rules"},
    {"role": "user", "content": "Look for ducks"},
    CALL,
    {"role": "user", "content": "Well?"},
    RESULT,
]


def test_compacted_and_continued(llm: DictatedLLM, oai: openai.OpenAI) -> None:
    made = oai.responses.compact(model=MODEL, input=ITEMS, instructions="Be kind.")
    assert made.object == "response.compaction"
    *kept, compaction = made.output
    assert [item.content[0].text for item in kept] == ["Look for ducks", "Well?"]  # type: ignore[union-attr]
    assert compaction.type == "compaction"
    assert unseal(compaction.encrypted_content) == "It is about ducks."
    assert made.usage.input_tokens == len(llm.prompts[-1])
    assert made.usage.output_tokens_details.reasoning_tokens > 0
    prompt = llm.prompts[-1]
    assert prompt.startswith("[system] Be kind.\nRules\n[user] Look for ducks\n[assistant] [call c1 look {}]")
    assert "[user] Stop here and summarise" in prompt
    assert llm.seen[-1]["params"].max_tokens == 1024, "of a context of 4096"
    after = [item.to_dict(warnings=False) for item in made.output]
    reply = oai.responses.create(model=MODEL, input=[*after, {"role": "user", "content": say("Quack")}])  # type: ignore[list-item]
    assert reply.output_text == "Quack"
    assert llm.prompts[-1] == (
        "[user] Look for ducks\nWell?\nSummary of the conversation so far:\nIt is about ducks.\nSAY:Quack\n[assistant] "
    )
    twice = oai.responses.compact(model=MODEL, previous_response_id=reply.id)
    assert [item.type for item in twice.output] == ["message"] * 3 + ["compaction"]
    assert "Summary of the conversation so far:\nIt is about ducks." in llm.prompts[-1]


def test_the_oldest_turns_are_left_out_of_a_long_one() -> None:
    llm = DictatedLLM(context=1600, served_model_name=[MODEL])
    turns: list[Any] = [
        item
        for i in range(9)
        for item in ({"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"{i}" * 200})
    ]
    with echo_server(llm) as served:
        made = served.client.post("/v1/responses/compact", json={"input": turns}).json()
        assert len(made["output"]) == 10, "all that the user said stays"
        assert "question 0" not in llm.prompts[-1]
        assert "question 8" in llm.prompts[-1]
        assert 1600 - 400 - 250 < len(llm.prompts[-1]) <= 1600 - 400
        response = served.client.post("/v1/responses/compact", json={"input": "x" * 2000})
        assert response.status_code == 400
        assert "prompt is too long" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/responses/compact", "input", {}),
        ("/v1/responses/compact", "input", {"input": 3}),
        ("/v1/responses/compact", "input", {"input": [{"type": "compaction", "encrypted_content": "of another"}]}),
        ("/v1/responses", "input", {"input": [{"type": "compaction", "encrypted_content": "of another"}]}),
        ("/v1/responses", "input", {"input": [{"type": "compaction"}]}),
    ],
)
def test_refused(served: Served, path: str, field: str, body: dict[str, Any]) -> None:
    response = served.client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_unknown_names(served: Served) -> None:
    for body in ({"model": "gpt-9", "input": "x"}, {"previous_response_id": "resp_none"}):
        assert served.client.post("/v1/responses/compact", json=body).status_code == 404
