"""Requests as coding agents send them: long instructions, many tools, histories with thoughts, calls and results."""

from __future__ import annotations

from typing import Any

RULES = "You are a coding agent that works in the user's terminal. " + "Keep changes small, and say what you did. " * 80

SHELL = {
    "type": "object",
    "properties": {
        "cmd": {"type": "string", "description": "Shell command to run"},
        "workdir": {"type": "string"},
        "timeout_ms": {"type": "number"},
        "justification": {"type": ["string", "null"]},
    },
    "required": ["cmd"],
    "additionalProperties": False,
}
PLAN = {
    "type": "object",
    "properties": {
        "explanation": {"type": "string"},
        "plan": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "step": {"type": "string"},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                },
                "required": ["step", "status"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["plan"],
    "additionalProperties": False,
}
PATCH_GRAMMAR = 'start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?\nhunk: /.+/ LF\nLF: "\\n"'


def codex(items: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A turn of Codex: stateless, streamed, with tools of every type that it declares."""
    read = {"type": "function", "name": "read_page", "description": "Read.", "strict": False, "parameters": SHELL}
    return {
        "instructions": RULES,
        "input": [
            _message("developer", "<permissions instructions>\nApproval policy: never.\n</permissions instructions>"),
            _message("user", "# AGENTS.md instructions\n\n<INSTRUCTIONS>\nRun the tests.\n</INSTRUCTIONS>"),
            _message(
                "user", "<environment_context>\n  <cwd>/repo</cwd>\n  <shell>bash</shell>\n</environment_context>"
            ),
            *items,
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "description": "Run.", "strict": False, "parameters": SHELL},
            {"type": "function", "name": "update_plan", "description": "Plan.", "strict": False, "parameters": PLAN},
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "Edit files. Do not wrap the patch in JSON.",
                "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
            },
            {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
            {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": {}},
            {"type": "namespace", "name": "mcp__docs", "description": "Documentation.", "tools": [read]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199b1a0-8a5f-7d51-b9d5-3b6f3f7f3f7f",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "1"},
        **changes,
    }


def codex_with_rules(items: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A turn of a later Codex: its rules are a message, every item has an id, and a namespace holds other agents."""
    wait = {"type": "object", "properties": {"ids": {"type": "array", "items": {"type": "string"}}}}
    agents = [
        {"type": "function", "name": name, "description": name, "strict": False, "parameters": wait}
        for name in ("spawn_agent", "send_input", "wait_agent")
    ]
    before = [_message("developer", RULES), _message("developer", "<permissions instructions>none</permissions>")]
    before += [_message("user", "<environment_context>\n  <cwd>/repo</cwd>\n</environment_context>")]
    body = codex([*({**item, "id": f"msg_{i}"} for i, item in enumerate(before)), *items])
    body["input"] = body["input"][3:]  # without those of the earlier one
    body["tools"] = [
        body["tools"][0],
        {"type": "namespace", "name": "agents_v1", "description": "Other agents.", "tools": agents},
        {"type": "web_search", "external_web_access": False},
    ]
    del body["instructions"], body["text"]
    return body | {"reasoning": {"summary": "auto"}} | changes


def as_codex_replays(item: dict[str, Any]) -> dict[str, Any]:
    """An output item as Codex sends it back: without status, and of reasoning only what is sealed."""
    kept = {key: value for key, value in item.items() if key not in ("id", "status")}
    if item["type"] == "reasoning":
        kept["content"] = None
    if item["type"] == "message":
        kept["phase"] = "commentary"
    return kept


def _message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def claude_code(messages: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A turn of Claude Code."""
    names = ["Bash", "Read", "Edit", "Write", "Glob", "Grep", "Task", "TodoWrite", "WebFetch", "NotebookEdit"]
    tools: list[dict[str, Any]] = [
        {
            "name": name,
            "description": f"{name}: " + "what it does, at length. " * 20,
            "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **SHELL},
        }
        for name in names
    ]
    tools += [
        {"name": "mcp__db__query", "description": "Later.", "input_schema": SHELL, "defer_loading": True},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    ]
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    return {
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.156; cc_entrypoint=cli; cch=00000;"},
            {"type": "text", "text": "You are Claude Code.", **cached},
            {"type": "text", "text": RULES, **cached},
        ],
        "messages": messages,
        "tools": tools,
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
        **changes,
    }


# What generators of schemas write for the tools of an agent.
EVERYTHING = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "level": {"type": "string", "enum": ["low", "high"], "default": "low"},
        "line": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        "seconds": {"type": "integer", "exclusiveMinimum": 0, "maximum": 3600},
        "name": {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[a-z]+$"},
        "url": {"type": "string", "format": "uri"},
        "to": {"anyOf": [{"const": "main"}, {"type": "null"}, {"type": "object", "properties": {"id": {"const": 3}}}]},
        "metadata": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        "items": {"type": "array", "maxItems": 32, "items": {"type": "string"}},
    },
    "required": ["level"],
    "additionalProperties": False,
}


def claude_title(text: str) -> dict[str, Any]:
    """Claude Code asks for the title of a session: no tools, and an answer bound to a schema."""
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    body = claude_code([{"role": "user", "content": [{"type": "text", "text": f"<session>\n{text}\n</session>"}]}])
    del body["thinking"], body["context_management"]
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    return body | {"tools": [], "output_config": {"effort": "high", "format": form}}
