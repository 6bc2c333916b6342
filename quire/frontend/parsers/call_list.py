"""Calls as a JSON list of {"name", "parameters"}: how a model is made to call whose own format has no grammar."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from quire.frontend.parsers.base import Parser
from quire.types.reply import CallArguments, CallEnd, CallStart, Content, Piece, Tool
from quire.types.structured import GrammarSpec

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BORDER = re.compile(r'[",\[\]{}\\]')  # where a JSON value may go deeper, come back or end
_SPACE = " \t\r\n"
_ARGUMENTS = ("parameters", "arguments")


def new_call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


class CallListFormat:
    needs_special_tokens: ClassVar[bool] = False

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> Parser:
        del tools  # names of other functions cannot come
        return _CallListParser(parallel)

    def constraint(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> GrammarSpec | None:
        """A list of at least one call. None unless calls are required: text cannot be told from a list."""
        if not required:
            return None
        items: list[object] = []
        definitions: dict[str, Any] = {}
        for number, tool in enumerate(tools):
            parameters, more = _embedded(tool.parameters or {"type": "object"}, f"tool{number}")
            definitions |= more
            items.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": tool.name}, "parameters": parameters},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        schema: dict[str, object] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
        if definitions:
            schema["$defs"] = definitions
        if not parallel:
            schema["maxItems"] = 1
        return GrammarSpec("json_schema", json.dumps(schema, separators=(",", ":"), ensure_ascii=False))


CALL_LIST = CallListFormat()


def _embedded(schema: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema as a part of a larger one, and the definitions that its references now need at the root."""
    places = ("$defs", "definitions")

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {k: target(v) if k == "$ref" and isinstance(v, str) else moved(v) for k, v in value.items()}

    def target(pointer: str) -> str:
        _, _, path = pointer.partition("#/")
        place, _, rest = path.partition("/")
        if not pointer.startswith("#"):
            return pointer
        return f"#/$defs/{name}.{rest}" if place in places else f"#/$defs/{name}{pointer[1:]}"

    definitions = {f"{name}.{key}": moved(v) for place in places for key, v in (schema.get(place) or {}).items()}
    plain = {key: moved(value) for key, value in schema.items() if key not in places}
    if '"$ref"' in json.dumps(schema):
        definitions[name] = plain
        return {"$ref": f"#/$defs/{name}"}, definitions
    return plain, {}


class _CallListParser:
    """Reads the list value by value; the arguments pass through as they come."""

    def __init__(self, parallel: bool) -> None:
        self._parallel = parallel
        self._held = ""  # not read yet
        self._read = self._open_list
        self._pieces: list[Piece] = []
        self._key = ""
        self._name: str | None = None
        self._waiting: list[str] | None = None  # arguments that came before the name
        self._index = -1  # of the call that has begun
        self._has_begun = False
        self._depth = 0  # inside the value being read
        self._in_string = False

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        while self._held and self._read():
            pass
        pieces, self._pieces = self._pieces, []
        if not self._parallel:
            pieces = [piece for piece in pieces if getattr(piece, "index", 0) == 0]
        return pieces

    def finish(self) -> list[Piece]:
        is_text = self._read in (self._open_list, self._text)
        return [Content(self._held)] if is_text and self._held else []

    # Each reads from the start of what is held; False: more text is needed.

    def _open_list(self) -> bool:
        rest = self._held.lstrip(_SPACE)
        if rest:
            self._read = self._item if rest[0] == "[" else self._text
            self._held = rest[1:] if rest[0] == "[" else self._held
        return bool(rest)

    def _text(self) -> bool:
        self._pieces.append(Content(self._held))
        self._held = ""
        return False

    def _item(self) -> bool:
        self._held = self._held.lstrip(_SPACE + ",")
        if self._held.startswith("{"):
            self._held = self._held[1:]
            self._name, self._waiting, self._has_begun = None, None, False
            self._read = self._entry
            return True
        if self._held:
            self._read = self._after
        return bool(self._held)

    def _after(self) -> bool:
        self._held = ""  # the list is closed
        return False

    def _entry(self) -> bool:
        self._held = self._held.lstrip(_SPACE + ",:")
        if self._held.startswith("}"):
            self._held = self._held[1:]
            self._end_call()
            self._read = self._item
            return True
        key = _STRING.match(self._held)
        if key is None:
            return False
        self._key, self._held = json.loads(key[0], strict=False), self._held[key.end() :]
        self._read = self._name_value if self._key == "name" else self._value_start
        return True

    def _name_value(self) -> bool:
        self._held = self._held.lstrip(_SPACE + ":")
        name = _STRING.match(self._held)
        if name is None:
            return False
        self._name, self._held = str(json.loads(name[0], strict=False)), self._held[name.end() :]
        self._begin_call()
        self._read = self._entry
        return True

    def _value_start(self) -> bool:
        self._held = self._held.lstrip(_SPACE + ":")
        self._depth, self._in_string = 0, False
        if self._held:
            self._read = self._value
        return bool(self._held)

    def _value(self) -> bool:
        text, at = self._held, 0
        while (border := _BORDER.search(text, at)) is not None:
            char, at = border[0], border.end()
            if self._in_string:
                if char == "\\":
                    if at == len(text):
                        self._pass_on(text[: at - 1])
                        self._held = "\\"
                        return False
                    at += 1
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "[{":
                self._depth += 1
            elif char == "," and self._depth:
                continue
            else:
                is_inside = self._depth > 0  # else a plain value, which this character does not belong to
                self._depth -= is_inside
                if not self._depth:
                    end = at if is_inside else at - 1
                    self._pass_on(text[:end])
                    self._held = text[end:]
                    self._read = self._entry
                    return True
        self._pass_on(text)
        self._held = ""
        return False

    def _pass_on(self, text: str) -> None:
        """Text of the value."""
        if self._key not in _ARGUMENTS or not text:
            return
        if self._has_begun:
            self._pieces.append(CallArguments(self._index, text))
        else:
            self._waiting = [*(self._waiting or ()), text]

    def _begin_call(self) -> None:
        if self._name is None or self._has_begun:
            return
        self._has_begun = True
        self._index += 1
        self._pieces.append(CallStart(self._index, new_call_id(), self._name))
        self._pieces += [CallArguments(self._index, text) for text in self._waiting or ()]

    def _end_call(self) -> None:
        if self._has_begun:
            self._pieces.append(CallEnd(self._index))
