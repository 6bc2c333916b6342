"""Every field of every generating endpoint: values that are taken and what they do, values that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.types.sampling import SamplingParams
from tests.server.agents.conftest import MODEL
from tests.server.agents.dictated_llm import say

COMPLETIONS, CHAT, BATCH = "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNTING = ("/v1/responses/input_tokens", "/v1/messages/count_tokens")
USER: list[dict[str, Any]] = [{"role": "user", "content": say("Hello")}]
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": say("Hello")},
    CHAT: {"messages": USER},
    BATCH: {"messages": [USER]},
    RESPONSES: {"input": say("Hello")},
    MESSAGES: {"messages": USER, "max_tokens": 100, "model": MODEL},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [72]},
    COUNTING[0]: {"input": say("Hello")},
    COUNTING[1]: {"messages": USER, "model": MODEL},
}
OPENAI = (COMPLETIONS, CHAT, RESPONSES)
TOOLS = [{"type": "function", "function": {"name": "look"}}]
RESPONSE_TOOLS = [{"type": "function", "name": "look"}]
CLAUDE_TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@dataclass
class Answered:
    """What a request became: how it was put to the engine, and the reply."""

    seen: dict[str, Any]
    reply: dict[str, Any]

    @property
    def params(self) -> SamplingParams:
        params: SamplingParams = self.seen["params"]
        return params

    @property
    def prompt(self) -> str:
        return str(self.seen["prompt"].text)

    @property
    def choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = self.reply["choices"][0]
        return choice


Effect = Callable[[Answered], bool]


def becomes(name: str, value: Any) -> Effect:
    return lambda answered: getattr(answered.params, name) == value


# Sampling: the same everywhere; the field, a value, and what SamplingParams makes of it
SAMPLING: list[tuple[str, Any, Any]] = [
    ("temperature", 0.5, 0.5),
    ("temperature", 2, 2.0),
    ("top_p", 0.5, 0.5),
    ("top_k", 7, 7),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("min_p", 0.5, 0.5),
    ("min_p", 0, 0.0),
    ("repetition_penalty", 1.5, 1.5),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("seed", 5, 5),
    ("seed", -1, None),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("stop", "x", ["x"]),
    ("stop", ["x", "y"], ["x", "y"]),
    ("stop", [], []),
    ("stop_token_ids", [1, 2], [1, 2]),
    ("include_stop_str_in_output", True, True),
    ("ignore_eos", True, True),
    ("min_tokens", 3, 3),
    ("logit_bias", {"5": -1.5}, {5: -1.5}),
    ("logit_bias", {"5": 1000, "6": -1000}, {5: 100.0, 6: -100.0}),
    ("allowed_token_ids", [1, 2], [1, 2]),
    ("bad_words", ["no"], ["no"]),
    ("skip_special_tokens", False, False),
]


# What is refused wherever the field is, and the name that the refusal has
SAMPLING_REFUSED: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("presence_penalty", -2.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", 2.1),
    ("seed", 2**63),
    ("stop", [""]),
    ("stop_token_ids", [-1]),
    ("include_stop_str_in_output", "yes"),
    ("ignore_eos", 1),
    ("min_tokens", -1),
    ("logit_bias", {"x": 1}),
    ("allowed_token_ids", []),
    ("bad_words", [""]),
    ("skip_special_tokens", "no"),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"rexeg": "a"}),
    ("priority", 1),
    ("cache_salt", ""),
    ("kv_transfer_params", {"x": 1}),
    ("ec_transfer_params", {"x": 1}),
    ("model", 3),
]


def is_bound(answered: Answered) -> bool:
    return answered.seen["constraint"] is not None


def shows(text: str) -> Effect:
    return lambda answered: text in answered.prompt


def replies(**fields: Any) -> Effect:
    return lambda answered: all(answered.reply[name] == value for name, value in fields.items())


# Endpoint, fields, and what they do; None: they are taken and do nothing
TAKEN: list[tuple[str, dict[str, Any], Effect | None]] = [
    # -- completions
    (COMPLETIONS, {"prompt": [72, 105]}, lambda a: a.seen["prompt"].token_ids == [72, 105]),
    (COMPLETIONS, {"prompt": ["a", "b"]}, lambda a: [c["index"] for c in a.reply["choices"]] == [0, 1]),
    (COMPLETIONS, {"prompt": [[72], [73]]}, lambda a: a.reply["usage"]["prompt_tokens"] == 2),
    (COMPLETIONS, {"model": MODEL}, replies(model=MODEL)),
    (COMPLETIONS, {}, becomes("max_tokens", 16)),
    (COMPLETIONS, {"max_tokens": None}, becomes("max_tokens", 16)),
    (COMPLETIONS, {"max_tokens": 3}, lambda a: a.choice["finish_reason"] == "length"),
    (COMPLETIONS, {"max_tokens": 0, "echo": True}, lambda a: a.choice["text"] == say("Hello")),
    (COMPLETIONS, {"echo": True}, lambda a: a.choice["text"] == say("HelloHello")),
    (COMPLETIONS, {"logprobs": 2}, lambda a: len(a.choice["logprobs"]["tokens"]) == 6),
    (COMPLETIONS, {"logprobs": 0}, becomes("logprobs", 0)),
    (COMPLETIONS, {"n": 2}, becomes("n", 2)),
    (COMPLETIONS, {"best_of": 1}, None),
    (COMPLETIONS, {"prompt_logprobs": 2}, becomes("prompt_logprobs", 2)),
    (COMPLETIONS, {"prompt_logprobs": -1}, becomes("prompt_logprobs", -1)),
    (COMPLETIONS, {"add_special_tokens": False}, None),
    (COMPLETIONS, {"suffix": ""}, None),
    (COMPLETIONS, {"thinking_token_budget": -1}, None),
    (COMPLETIONS, {"stream": False, "stream_options": None}, None),
    # -- chat
    (CHAT, {}, lambda a: a.params.max_tokens is None),
    (CHAT, {"max_tokens": 3}, becomes("max_tokens", 3)),
    (CHAT, {"max_completion_tokens": 4, "max_tokens": 3}, becomes("max_tokens", 4)),
    (CHAT, {"logprobs": True}, lambda a: len(a.choice["logprobs"]["content"]) == 6),
    (CHAT, {"logprobs": True, "top_logprobs": 2}, becomes("logprobs", 2)),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, becomes("logprobs", -1)),
    (CHAT, {"tools": TOOLS}, shows("[tools] look")),
    (CHAT, {"tools": TOOLS, "tool_choice": "none"}, lambda a: not is_bound(a)),
    (CHAT, {"tools": TOOLS, "tool_choice": "required"}, is_bound),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}}, is_bound),
    (CHAT, {"tool_choice": "none"}, None),
    (CHAT, {"tools": TOOLS, "parallel_tool_calls": False}, None),
    (CHAT, {"thinking_token_budget": 5}, lambda a: a.seen["constraint"].thinking.max_tokens == 5),
    (CHAT, {"max_thinking_tokens": 5}, lambda a: a.seen["constraint"].thinking.max_tokens == 5),
    (CHAT, {"thinking_token_budget": -1}, lambda a: not is_bound(a)),
    (CHAT, {"include_reasoning": False}, None),
    (CHAT, {"add_generation_prompt": False}, lambda a: not a.prompt.endswith("[assistant] ")),
    (CHAT, {"continue_final_message": True}, lambda a: a.prompt.endswith("Hello")),
    (CHAT, {"documents": [{"title": "t", "text": "x"}]}, None),
    (CHAT, {"chat_template_kwargs": {"shout": True}}, None),
    (CHAT, {"echo": True}, None),
    (CHAT, {"add_special_tokens": True}, None),
    (CHAT, {"return_prompt_text": True}, lambda a: a.reply["prompt_text"] == a.prompt),
    (CHAT, {"prompt_logprobs": 1}, becomes("prompt_logprobs", 1)),
    (CHAT, {"n": 1, "model": MODEL}, None),
    *((CHAT, {"reasoning_effort": effort}, None) for effort in ("none", "minimal", "low", "medium", "high", "xhigh")),
    (CHAT, {"reasoning_effort": "max"}, None),
    *((CHAT, {"verbosity": verbosity}, shows(f"[{verbosity}]")) for verbosity in ("low", "medium", "high")),
    (CHAT, {"modalities": ["text"], "stream_options": None}, None),
    # OpenAI's own that have no effect here
    (CHAT, {"store": True, "metadata": {"a": "b"}, "service_tier": "auto"}, None),
    (CHAT, {"prediction": {"type": "content", "content": "x"}, "safety_identifier": "x"}, None),
    (CHAT, {"prompt_cache_key": "x", "prompt_cache_retention": "24h", "media_io_kwargs": {}}, None),
    (CHAT, {"mm_processor_kwargs": {}, "return_assistant_tokens_mask": False, "return_token_offsets": True}, None),
    # -- what completions and chat share
    *(
        case
        for path in (COMPLETIONS, CHAT)
        for case in (
            (path, {"response_format": {"type": "text"}}, lambda a: not is_bound(a)),
            (path, {"response_format": {"type": "json_object"}}, is_bound),
            (path, {"response_format": JSON_SCHEMA}, is_bound),
            (path, {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, is_bound),
            (path, {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, is_bound),
            (path, {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}}, is_bound),
            (path, {"structured_outputs": {"regex": "a+"}}, is_bound),
            (path, {"structured_outputs": {"choice": ["a", "b"]}}, is_bound),
            (path, {"structured_outputs": {"grammar": 'root ::= "a"'}}, is_bound),
            (path, {"guided_regex": "a+"}, is_bound),
            (path, {"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, is_bound),
            (path, {"guided_json_object": True, "guided_whitespace_pattern": " "}, is_bound),
            (path, {"guided_choice": ["a"]}, is_bound),
            (path, {"guided_grammar": 'root ::= "a"'}, is_bound),
            (path, {"spaces_between_special_tokens": False}, becomes("spaces_between_special_tokens", False)),
            (path, {"request_id": "mine"}, lambda a: a.reply["id"].endswith("-mine")),
            (path, {"return_token_ids": True}, lambda a: a.choice["token_ids"] == [*map(ord, "Hello"), 0]),
            (path, {"cache_salt": "mine"}, lambda a: a.seen["cache_salt"] == "mine"),
            (path, {"priority": 0, "user": "me"}, None),
            (path, {"stream_options": None, "kv_transfer_params": None, "ec_transfer_params": {}}, None),
            (path, {"return_tokens_as_token_ids": True}, None),
        )
    ),
    # -- a batch of conversations
    (BATCH, {"messages": [USER, USER]}, lambda a: [c["index"] for c in a.reply["choices"]] == [0, 1]),
    (BATCH, {"temperature": 0.5, "max_tokens": 3}, becomes("max_tokens", 3)),
    # -- responses
    (RESPONSES, {"input": USER}, shows("Hello")),
    (RESPONSES, {"model": MODEL, "user": "me"}, replies(model=MODEL, user="me")),
    (RESPONSES, {"instructions": "Be brief."}, shows("[system] Be brief.")),
    (RESPONSES, {}, replies(max_output_tokens=None, store=True, background=False, truncation="disabled", tools=[])),
    (RESPONSES, {"max_output_tokens": 3}, replies(status="incomplete")),
    (RESPONSES, {"max_tool_calls": 3}, replies(max_tool_calls=3)),
    (RESPONSES, {"background": True}, replies(status="queued")),
    (RESPONSES, {"store": False}, replies(store=False)),
    (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, becomes("logprobs", 2)),
    (RESPONSES, {"include": ["reasoning.encrypted_content", "code_interpreter_call.outputs"]}, None),
    (RESPONSES, {"metadata": {"a": "b"}}, replies(metadata={"a": "b"})),
    (RESPONSES, {"tools": RESPONSE_TOOLS, "parallel_tool_calls": False}, replies(parallel_tool_calls=False)),
    (RESPONSES, {"tools": RESPONSE_TOOLS, "tool_choice": "required"}, is_bound),
    (RESPONSES, {"tools": RESPONSE_TOOLS, "tool_choice": {"type": "function", "name": "look"}}, is_bound),
    *((RESPONSES, {"reasoning": {"effort": effort}}, None) for effort in ("none", "minimal", "low", "high", "max")),
    (RESPONSES, {"reasoning": {"summary": "auto"}}, replies(reasoning={"effort": None, "summary": "auto"})),
    *((RESPONSES, {"service_tier": tier}, None) for tier in ("auto", "default", "flex", "scale", "priority")),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, is_bound),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, is_bound),
    (RESPONSES, {"text": {"verbosity": "low"}}, shows("[low]")),
    (RESPONSES, {"truncation": "auto"}, replies(truncation="auto")),
    (RESPONSES, {"request_id": "resp_mine"}, replies(id="resp_mine")),
    (RESPONSES, {"prompt_cache_key": "a", "safety_identifier": "b"}, replies(safety_identifier="b")),
    (RESPONSES, {"structured_outputs": {"regex": "a"}}, is_bound),
    (RESPONSES, {"chat_template_kwargs": {"a": 1}, "cache_salt": "s"}, lambda a: a.seen["cache_salt"] == "s"),
    (RESPONSES, {"thinking_token_budget": 5}, lambda a: a.seen["constraint"].thinking.max_tokens == 5),
    (RESPONSES, {"include_reasoning": False, "priority": 0, "vllm_xargs": {}, "media_io_kwargs": {}}, None),
    (RESPONSES, {"kv_transfer_params": {}, "ec_transfer_params": {}, "enable_response_messages": False}, None),
    # -- messages
    (MESSAGES, {"system": "Be brief."}, shows("[system] Be brief.")),
    (MESSAGES, {"system": [{"type": "text", "text": "Be brief."}]}, shows("[system] Be brief.")),
    (MESSAGES, {"max_tokens": 3}, replies(stop_reason="max_tokens")),
    (MESSAGES, {"stop_sequences": ["ll"]}, replies(stop_reason="stop_sequence", stop_sequence="ll")),
    (MESSAGES, {"temperature": 0.5, "seed": 3}, lambda a: (a.params.temperature, a.params.seed) == (0.5, 3)),
    (MESSAGES, {"top_p": 0.5, "top_k": 7}, lambda a: (a.params.top_p, a.params.top_k) == (0.5, 7)),
    (MESSAGES, {"tools": CLAUDE_TOOLS}, shows("[tools] look")),
    *((MESSAGES, {"tools": CLAUDE_TOOLS, "tool_choice": {"type": kind}}, None) for kind in ("auto", "none")),
    (MESSAGES, {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "any"}}, is_bound),
    (MESSAGES, {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool", "name": "look"}}, is_bound),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 7}}, is_bound),
    (MESSAGES, {"thinking": {"type": "disabled"}}, None),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, is_bound),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, is_bound),
    *((MESSAGES, {"output_config": {"effort": effort}}, None) for effort in ("low", "medium", "high", "xhigh", "max")),
    (MESSAGES, {"metadata": {"user_id": "u"}, "service_tier": "auto", "stream": False}, None),
    (MESSAGES, {"chat_template_kwargs": {"a": 1}, "context_management": {"edits": []}, "speed": "fast"}, None),
    (MESSAGES, {"kv_transfer_params": {}, "ec_transfer_params": {}, "cache_control": {"type": "ephemeral"}}, None),
    # -- tokens
    ("/tokenize", {"add_special_tokens": False, "return_token_strs": False, "model": MODEL}, replies(count=5)),
    ("/detokenize", {"model": MODEL}, replies(prompt="H")),
    (COUNTING[0], {"instructions": "Be brief.", "tools": RESPONSE_TOOLS}, replies(object="response.input_tokens")),
    (COUNTING[1], {"system": "Be brief.", "tools": CLAUDE_TOOLS, "tool_choice": {"type": "auto"}}, None),
]


REFUSED: list[tuple[str, str, Any]] = [
    (COMPLETIONS, "max_tokens", 0),
    (COMPLETIONS, "n", 0),
    (COMPLETIONS, "n", 129),
    (COMPLETIONS, "logprobs", -1),
    (COMPLETIONS, "prompt_logprobs", -2),
    (COMPLETIONS, "suffix", "x"),
    (COMPLETIONS, "best_of", 2),
    (COMPLETIONS, "echo", 1),
    (COMPLETIONS, "prompt", []),
    (COMPLETIONS, "prompt", [-1]),
    (COMPLETIONS, "add_special_tokens", "x"),
    (COMPLETIONS, "stream_options", {"include_usage": True}),
    (COMPLETIONS, "thinking_token_budget", 5),
    (CHAT, "messages", []),
    (CHAT, "top_logprobs", 2),
    (CHAT, "top_logprobs", -2),
    (CHAT, "tools", []),
    (CHAT, "tool_choice", "auto"),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", "any"),
    (CHAT, "reasoning_effort", "enormous"),
    (CHAT, "thinking_token_budget", -2),
    (CHAT, "max_completion_tokens", 0),
    (CHAT, "chat_template", "x"),
    (CHAT, "documents", "x"),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "audio", {"voice": "x"}),
    (CHAT, "web_search_options", {"a": 1}),
    (CHAT, "function_call", "none"),
    (CHAT, "moderation", {"model": "x"}),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "verbosity", "chatty"),
    (CHAT, "parallel_tool_calls", "no"),
    (CHAT, "response_format", {"type": "json_schema"}),
    (CHAT, "response_format", {"type": "yaml"}),
    (CHAT, "stream_options", {"include_usage": True}),
    (BATCH, "n", 2),
    (BATCH, "stream", True),
    (BATCH, "tools", TOOLS),
    (BATCH, "tool_choice", "auto"),
    (BATCH, "echo", True),
    (RESPONSES, "input", []),
    (RESPONSES, "max_output_tokens", 0),
    (RESPONSES, "max_tool_calls", 0),
    (RESPONSES, "include", ["everything"]),
    (RESPONSES, "metadata", {"k" * 65: "v"}),
    (RESPONSES, "metadata", {str(i): "" for i in range(17)}),
    (RESPONSES, "top_logprobs", 21),
    (RESPONSES, "truncation", "some"),
    (RESPONSES, "service_tier", "gold"),
    (RESPONSES, "reasoning", {"effort": "enormous"}),
    (RESPONSES, "reasoning", {"mode": "pro"}),
    (RESPONSES, "text", {"format": {"type": "yaml"}}),
    (RESPONSES, "text", {"format": {"type": "json_schema"}}),
    (RESPONSES, "tool_choice", "any"),
    (RESPONSES, "tools", [{"type": "web_search"}]),
    (RESPONSES, "request_id", "a b"),
    *((RESPONSES, name, {"id": "x"}) for name in ("prompt", "conversation", "context_management", "moderation")),
    (RESPONSES, "enable_response_messages", True),
    (RESPONSES, "previous_input_messages", [{}]),
    (MESSAGES, "max_tokens", 0),
    (MESSAGES, "max_tokens", None),
    (MESSAGES, "messages", []),
    (MESSAGES, "stop_sequences", [""]),
    (MESSAGES, "temperature", 2.1),
    (MESSAGES, "top_p", 0),
    (MESSAGES, "top_k", -2),
    (MESSAGES, "tool_choice", {"type": "tool"}),
    (MESSAGES, "thinking", {"type": "sometimes"}),
    (MESSAGES, "thinking", {"type": "enabled", "budget_tokens": 0}),
    (MESSAGES, "output_config", {"effort": "enormous"}),
    (MESSAGES, "output_config", {"format": {"type": "yaml"}}),
    (MESSAGES, "service_tier", "gold"),
    (MESSAGES, "container", "x"),
    (MESSAGES, "mcp_servers", [{}]),
    (MESSAGES, "thread", {"type": "create"}),
    (MESSAGES, "output_config", {"task_budget": {"type": "tokens", "total": 100}}),
    (MESSAGES, "kv_transfer_params", {"a": 1}),
    (MESSAGES, "ec_transfer_params", {"a": 1}),
    ("/tokenize", "prompt", 3),
    ("/detokenize", "tokens", [-1]),
    ("/detokenize", "tokens", [2**63]),
]
