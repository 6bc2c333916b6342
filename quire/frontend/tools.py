"""The tools of a chat request, as clients write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.foundation.errors import InputError
from quire.foundation.shown import clipped, shown
from quire.types.reply import NamedTool, Tool, ToolChoice

MOST_NAMED = 16  # tools, in a message


def read_tools(tools: Any) -> list[Tool]:
    """Of a list of {"type": "function", "function": {"name", …}}. Raises InputError naming what is wrong."""
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InputError(f"tools must be a list, got {type(tools).__name__}", "tools")
    return [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _read_tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise InputError(f'{where} must be {{"type": "function", "function": {{"name": …}}}}', "tools")
    function = tool["function"]
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}.function.name must be a non-empty string, got {shown(name)}", "tools")
    if description is not None and not isinstance(description, str):
        raise InputError(f"{where}.function.description must be a string", "tools")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InputError(f"{where}.function.parameters must be a JSON schema (an object)", "tools")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InputError(f"{where}.function.strict must be true or false, got {shown(strict)}", "tools")
    return Tool(name, description, None if parameters is None else dict(parameters), bool(strict))


def read_tool_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """None means "auto" if there are tools. Raises InputError for a choice that the tools do not allow."""
    if choice is None:
        return "auto" if tools else "none"
    if choice == "none":
        return "none"
    if not tools:
        raise InputError("tool_choice needs tools", "tool_choice")
    if choice in ("auto", "required"):
        known: ToolChoice = choice
        return known
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InputError(
            "tool_choice must be 'none', 'auto', 'required' or "
            f'{{"type": "function", "function": {{"name": …}}}}, got {shown(choice)}',
            "tool_choice",
        )
    if name not in [tool.name for tool in tools]:
        names = ", ".join(clipped(tool.name, 64) for tool in tools[:MOST_NAMED])
        raise InputError(f"tool_choice names the function {shown(name)}, but tools holds only: {names}", "tool_choice")
    return NamedTool(name)
