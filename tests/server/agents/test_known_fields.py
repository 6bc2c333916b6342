"""What the official clients can send is a field, or refused by name, or said to have no effect. Nothing is dropped.

The fields are those of the request types of the clients that are installed: a newer client brings its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import beta as beta_types
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types import shared_params as openai_shared
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_compact_params, response_create_params
from openai.types.responses import response_text_config_param as text_params

from quire.server.anthropic.body import CountTokensBody, MessagesBody, OutputOptions, ThinkingOptions, ToolChoiceOptions
from quire.server.generate.protocol import ChatBody, CompletionBody
from quire.server.http.body import Body
from quire.server.pooling.protocol import EmbeddingBody
from quire.server.responses.body import SHARED, CountBody, ReasoningOptions, ResponsesBody, TextOptions
from tests.server.agents.conftest import MODEL
from tests.server.agents.dictated_llm import DictatedLLM, say
from tests.server.agents.field_tables import BASE, CHAT, COMPLETIONS, COUNTING, MESSAGES, RESPONSES
from tests.server.conftest import Served

DOCS = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
EMBEDDINGS, COMPACT = "/v1/embeddings", "/v1/responses/compact"
# Path, the fields that it takes, the clients' types of its body
KNOWN: list[tuple[str, type[Body], list[Any]]] = [
    (
        MESSAGES,
        MessagesBody,
        [message_create_params.MessageCreateParamsBase, beta_create_params.MessageCreateParamsBase],
    ),
    (
        COUNTING[1],
        CountTokensBody,
        [message_count_tokens_params.MessageCountTokensParams, beta_count_params.MessageCountTokensParams],
    ),
    (CHAT, ChatBody, [chat_create_params.CompletionCreateParamsBase]),
    (COMPLETIONS, CompletionBody, [completion_create_params.CompletionCreateParamsBase]),
    (RESPONSES, ResponsesBody, [response_create_params.ResponseCreateParamsBase]),
    (COUNTING[0], CountBody, [input_token_count_params.InputTokenCountParams]),
    (COMPACT, CountBody, [response_compact_params.ResponseCompactParams]),
    (EMBEDDINGS, EmbeddingBody, [embedding_create_params.EmbeddingCreateParams]),
]
# … and of the objects in them
INNER: list[tuple[str, str, dict[str, Any], type[Body], list[Any]]] = [
    (
        MESSAGES,
        "thinking",
        {"type": "adaptive"},
        ThinkingOptions,
        [beta_types.BetaThinkingConfigEnabledParam, beta_types.BetaThinkingConfigAdaptiveParam],
    ),
    (MESSAGES, "output_config", {}, OutputOptions, [beta_types.BetaOutputConfigParam]),
    (
        MESSAGES,
        "tool_choice",
        {"type": "none"},
        ToolChoiceOptions,
        [beta_types.BetaToolChoiceAutoParam, beta_types.BetaToolChoiceToolParam],
    ),
    (RESPONSES, "reasoning", {}, ReasoningOptions, [openai_shared.Reasoning]),
    (RESPONSES, "text", {}, TextOptions, [text_params.ResponseTextConfigParam]),
]
ANYTHING = [{"type": "anything"}]


def names_of(types: list[Any]) -> set[str]:
    return {name for kind in types for name in kind.__required_keys__ | kind.__optional_keys__}


def cases(*, refused: bool) -> list[Any]:
    """Of every field that is known and no field here: the path, where it is, its name."""
    found = []
    for path, body, types in KNOWN:
        shared = SHARED if issubclass(body, CountBody) else ()
        found += [(path, None, {}, body, name) for name in names_of(types) - body.model_fields.keys() - set(shared)]
    for path, field, plain, body, types in INNER:
        found += [(path, field, plain, body, name) for name in names_of(types) - body.model_fields.keys()]
    wanted = [case for case in found if (case[4] in case[3].unsupported) == refused]
    return [pytest.param(*case, id=f"{case[0]} {case[1] or ''} {case[4]}") for case in sorted(wanted, key=str)]


def with_field(path: str, field: str | None, plain: dict[str, Any], name: str) -> dict[str, Any]:
    more = {name: ANYTHING} if field is None else {field: {**plain, name: ANYTHING}}
    return BASE.get(path, {"input": say("Hello")}) | more


@pytest.mark.parametrize(("path", "field", "plain", "body", "name"), cases(refused=True))
def test_refused_by_name(
    served: Served, path: str, field: str | None, plain: dict[str, Any], body: type[Body], name: str
) -> None:
    del body
    answer = served.client.post(path, json=with_field(path, field, plain, name))
    assert answer.status_code == 400, answer.text
    assert (name if field is None else f"{field}.{name}") in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "field", "plain", "body", "name"), cases(refused=False))
def test_what_has_no_effect_is_said(
    served: Served, path: str, field: str | None, plain: dict[str, Any], body: type[Body], name: str
) -> None:
    """In the table of the fields, and in the docs; and the engine is asked the same as without it."""
    assert name in body.without_effect, f"{name} of {path} is known to the client and dropped in silence"
    assert f"`{name}`" in DOCS
    llm = served.llm
    before = len(llm.seen)
    asked = []
    for request in (with_field(path, field, plain, name), with_field(path, field, plain, "no_such_field")):
        answer = served.client.post(path, json=request)
        assert answer.status_code == 200, answer.text
        asked += [[seen["params"], seen["prompt"], seen["constraint"]] for seen in llm.seen[before:]]
        before = len(llm.seen)
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :]


@pytest.mark.parametrize("body", sorted({body for _, body, _ in KNOWN}, key=str))
def test_no_field_is_of_two_kinds(body: type[Body]) -> None:
    assert not set(body.unsupported) & body.model_fields.keys() - {"logits_processors"}
    assert not set(body.unsupported) & set(body.without_effect)


def test_a_tool_runner_sends_the_whole_conversation_again(claude: anthropic.Anthropic, llm: DictatedLLM) -> None:
    """Its first request asks for a thread. It is told that there are none, and goes on without, history and all."""
    calls = []

    @anthropic.beta_tool
    def look(query: str) -> str:
        """Look up something.

        Args:
            query: What.
        """
        calls.append(query)
        return f"found {query}\n{say('It is red.')}"

    call = '<tool_call>\n{"name": "look", "arguments": {"query": "jam"}}\n</tool_call>'
    runner = claude.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=500,
        system="Be brief.",
        tools=[look],
        messages=[{"role": "user", "content": f"What colour? {say(call)}"}],
    )
    final = runner.until_done()
    assert calls == ["jam"]
    assert final.content[0].type == "text"
    assert final.content[0].text == "It is red."
    assert "[system] Be brief." in llm.prompts[-1]
    assert "What colour?" in llm.prompts[-1]
    assert "[tool] found jam" in llm.prompts[-1]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_threads_are_refused_as_the_client_understands(served: Served, thread: dict[str, Any]) -> None:
    before = len(served.llm.seen)
    answer = served.client.post(MESSAGES, json=BASE[MESSAGES] | {"thread": thread, "stream": True})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "thread" in error["message"]
    assert len(served.llm.seen) == before
