"""Calls as JSON objects that hold a name and arguments, alone or in lists, with or without markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from quire.parsers.calls import PieceBuilder
from quire.parsers.json_text import dumps, is_object, pass_value, read_string, read_value, without_surrogates
from quire.parsers.layouts.marked import NOT_A_CALL, MarkedFormat, Section
from quire.parsers.layouts.structural import TextAndCalls, json_value, literal, regex, schema_of, sequence, tag
from quire.parsers.scanner import SPACE, Markers, Scanner, Step
from quire.types.reply import Tool

Emit = Callable[[str], None]
BARE = ("{", "[")  # openings that are part of the JSON
_OTHER_KEYS = ("id", "type", "index", "tool_call_id")  # that calls have beside their name and arguments


class Ending(Enum):
    """How reading a call ended."""

    NONE = "not a call: nothing came of it"
    CUT = "begun, but the arguments broke off"
    WHOLE = "the arguments have an end"


@dataclass(frozen=True, kw_only=True)
class JsonCalls(MarkedFormat):
    """{"name": …, "arguments": {…}} in any order of keys; other keys are read over.

    An opening may be the bracket that the JSON begins with: then only an object with both keys is a call.
    """

    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")  # the first is what the model is trained to write
    keyed_by_name: bool = False  # {NAME: {…}} instead
    prefixes: tuple[str, ...] = ()  # may stand between the opening and the JSON
    tails: tuple[str, ...] = ()  # close it as well, but only right behind the JSON
    separators: str = SPACE + ",;]}"
    # What the grammar writes: a list behind the first opening, or objects one by one.
    is_list: bool = False
    list_brackets: tuple[str, str] = ("[", "]")
    id_key: str = ""  # of a number that stands first in an object
    is_bare: bool = False  # the objects have nothing around them
    begin: str = ""  # before an object, if more than the first opening
    end: str = ""  # behind an object, or the list
    joint: str = ", "  # between the calls of a list, and of objects that have no section of their own

    def read_section(
        self, scanner: Scanner, pieces: PieceBuilder, opening: str, tools: Sequence[Tool]
    ) -> Step[Section]:
        del tools  # JSON has its own types
        is_bare = opening in BARE
        if is_bare:
            scanner.pos -= 1
        if self.prefixes:
            yield from scanner.skip_space()
            yield from scanner.marker(self._prefixes)
        return (yield from self.read_calls(scanner, pieces, needs_arguments=is_bare))

    def read_calls(self, scanner: Scanner, pieces: PieceBuilder, *, needs_arguments: bool) -> Step[Section]:
        """Objects and lists of them, up to the closing marker or to what is none of these."""
        calls = 0
        in_list = False
        while True:
            yield from scanner.skip_space()
            char = yield from scanner.char()
            if char == "{":
                if calls:
                    scanner.begin(scanner.pos)
                ending = yield from self._read_object(scanner, pieces, needs_arguments)
                if ending is Ending.NONE:
                    return Section(calls, broken=True)
                calls += 1
                if ending is Ending.CUT:
                    break
            elif char == "[" and not in_list and not calls:
                in_list = True
                scanner.pos += 1
            elif char == "]" and in_list:
                in_list = False
                scanner.pos += 1
                if not self.closings:
                    break
            elif char and char in ",;}" and calls:
                scanner.pos += 1
            else:
                break
        if not calls:
            return NOT_A_CALL
        closed = bool(self._ends.all) and (yield from scanner.marker(self._ends)) is not None
        return Section(calls, closed)

    def _read_object(self, scanner: Scanner, pieces: PieceBuilder, needs_arguments: bool) -> Step[Ending]:
        """At a brace."""
        scanner.pos += 1
        name: str | None = None
        early: list[str] | None = None  # arguments that came before the name
        while True:
            yield from scanner.skip_space()
            char = yield from scanner.char()
            if char == ",":
                scanner.pos += 1
                continue
            if char == "}" and name is not None and not needs_arguments:
                scanner.pos += 1
                return _call_without_arguments(pieces, name)
            key = yield from read_string(scanner)
            if key is None or not (yield from _read_colon(scanner)):
                return Ending.NONE
            if self.keyed_by_name:
                name = key
            elif key in self.name_keys and name is None:
                name = yield from read_string(scanner)
                if name is None:
                    return Ending.NONE
                if early is None:
                    continue
                pieces.start(name)
                for text in early:
                    pieces.arguments(text)
                pieces.end()
                return (yield from self._read_rest(scanner))
            is_arguments = self.keyed_by_name or key in self.argument_keys
            if is_arguments and name is not None:
                ending = yield from pass_arguments(scanner, pieces, name)
                return (yield from self._read_rest(scanner)) if ending is Ending.WHOLE else ending
            if is_arguments:
                early = yield from _read_arguments(scanner)
                if early is None:
                    return Ending.NONE
            elif (needs_arguments and key not in _OTHER_KEYS) or (yield from read_value(scanner)) is None:
                return Ending.NONE

    def _read_rest(self, scanner: Scanner) -> Step[Ending]:
        """The keys behind a call that is complete, and its last brace."""
        while True:
            yield from scanner.skip_space()
            char = yield from scanner.char()
            if char == ",":
                scanner.pos += 1
            elif char == '"':
                if (yield from read_string(scanner)) is None or not (yield from _read_colon(scanner)):
                    return Ending.WHOLE
                if (yield from read_value(scanner)) is None:
                    return Ending.WHOLE
            else:
                scanner.pos += char == "}"
                return Ending.WHOLE

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> TextAndCalls | None:
        name_key, argument_key = dumps(self.name_keys[0]), dumps(self.argument_keys[0])
        opening = self.openings[0]
        calls = []
        for tool in tools:
            name = dumps(tool.name)
            head = f"{{{name}: " if self.keyed_by_name else f"{{{name_key}: {name}, {argument_key}: "
            arguments = json_value(schema_of(tool))
            if self.id_key:
                number = regex("[0-9]{1,3}")
                arguments = sequence(number, literal(f'", {head.removeprefix("{")}'), arguments)
                head = f'{{{dumps(self.id_key)}: "'
            calls.append(tag(head, arguments, "}"))
        if self.is_list:
            is_bare = opening in BARE
            return TextAndCalls(
                calls=calls,
                separator=self.joint,
                begin=self.list_brackets[0] if is_bare else opening + self.list_brackets[0],
                end=self.list_brackets[1] + self.end,
                triggers=[f"[{{{name_key}:" if is_bare else opening],
                parallel=parallel,
            )
        if self.is_bare:
            return TextAndCalls(calls=calls, separator=self.joint, triggers=[f"{{{name_key}:"], parallel=parallel)
        begin = self.begin or opening
        calls = [{**call, "begin": begin + call["begin"], "end": call["end"] + self.end} for call in calls]
        return TextAndCalls(calls=calls, separator=self.joint, triggers=[opening], parallel=parallel)

    @cached_property
    def _ends(self) -> Markers:
        return Markers((*self.closings, *self.tails))

    @cached_property
    def _prefixes(self) -> Markers:
        return Markers(self.prefixes)


def _call_without_arguments(pieces: PieceBuilder, name: str) -> Ending:
    pieces.start(name)
    pieces.arguments("{}")
    pieces.end()
    return Ending.WHOLE


def _read_colon(scanner: Scanner) -> Step[bool]:
    yield from scanner.skip_space()
    if (yield from scanner.char()) != ":":
        return False
    scanner.pos += 1
    yield from scanner.skip_space()
    return True


def pass_arguments(scanner: Scanner, pieces: PieceBuilder, name: str, call_id: str | None = None) -> Step[Ending]:
    """The arguments of a call whose name is known, as they come. Models also write them as a string, or null."""
    if (yield from scanner.char()) == "{":
        pieces.start(name, call_id)
        is_json = yield from pass_value(scanner, pieces.arguments)
        if is_json is None:
            return Ending.CUT
        if is_json:
            pieces.end()
        return Ending.WHOLE
    texts = yield from _read_arguments(scanner)
    if texts is None:
        return Ending.NONE
    pieces.start(name, call_id)
    for text in texts:
        pieces.arguments(text)
    pieces.end()
    return Ending.WHOLE


def _read_arguments(scanner: Scanner) -> Step[list[str] | None]:
    """All of the arguments, as the texts they came in. None if they are not an object."""
    char = yield from scanner.char()
    if char == "{":
        parts: list[str] = []
        return parts if (yield from pass_value(scanner, parts.append)) else None
    if char == '"':
        text = yield from read_string(scanner)
        return [without_surrogates(text) or "{}"] if text is not None and (not text or is_object(text)) else None
    text = yield from read_value(scanner)
    return ["{}"] if text == "null" else None
