"""Regular expressions for xgrammar: what it leaves out in silence is refused, what it reads otherwise is rewritten.

Found by experiment with version 0.2: it ignores look-around in patterns of schemas and anchors within an expression,
takes line breaks for `.`, and compares a pattern with the JSON text of a string, where some characters are escaped.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

from quire.foundation.errors import InputError
from quire.types.structured import FIELD

_UNKNOWN = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "back-references",
    "GROUPREF_EXISTS": "conditions",
    "POSSESSIVE_REPEAT": "possessive repeats",
    "ATOMIC_GROUP": "atomic groups",
}
_ESCAPED_IN_JSON = {0x22, 0x5C, *range(0x20)}
_ANY = r"[^\n\r]"
_OPEN_COUNT = re.compile(r"\{,[0-9]+\}")  # a count in Python, text in ECMAScript


def checked(pattern: str, about: str, *, within_json: bool) -> str:
    """The pattern as xgrammar must be given it.

    about: what an error says it is about. within_json: it is a schema's, compared with a JSON string's text, of which
    it need match a part only. Raises InputError.
    """
    parsed = _parsed(pattern, about)
    for problem in _problems(list(parsed), within_json, is_outermost=True):
        raise InputError(f"{about} {problem}", FIELD)
    if parsed.state.flags & ~re.UNICODE.value or _OPEN_COUNT.search(pattern):
        raise InputError(f"{about} uses flags or {{,n}}, which the backend xgrammar does not read", FIELD)
    whole = _without_dots(pattern)
    if not within_json:
        return whole
    anchored = [str(operation) == "AT" for operation, _ in (*parsed[:1], *parsed[-1:])] or [False, False]
    if any(str(operation) == "BRANCH" for operation, _ in parsed):
        has_anchors = any(str(item[0]) == "AT" for _, value in parsed for branch in value[1] for item in branch)
        return whole if has_anchors else f"{_ANY}*({whole}){_ANY}*"
    return ("" if anchored[0] else f"{_ANY}*") + whole + ("" if anchored[-1] else f"{_ANY}*")


def _parsed(pattern: str, about: str) -> Any:
    from re import _parser  # type: ignore[attr-defined]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise InputError(f"{about} cannot be read: {str(error)[:100]}", FIELD) from None


def _problems(parsed: list[Any], within_json: bool, *, is_outermost: bool = False) -> Iterator[str]:
    for place, (operation, value) in enumerate(parsed):
        name = str(operation)
        if name in _UNKNOWN:
            yield f"uses {_UNKNOWN[name]}, which the backend xgrammar does not enforce"
        elif name == "AT":
            is_begin = str(value) == "AT_BEGINNING" and place == 0
            is_end = str(value) == "AT_END" and place == len(parsed) - 1
            if not is_outermost or not (is_begin or is_end):
                yield "has an anchor within, which the backend xgrammar does not enforce"
        elif name in ("LITERAL", "NOT_LITERAL") and within_json and value in _ESCAPED_IN_JSON:
            yield f"has the character {chr(value)!r}, which JSON escapes: the backend xgrammar cannot match it"
        elif name == "BRANCH":
            for branch in value[1]:
                yield from _problems(list(branch), within_json, is_outermost=is_outermost)
        elif name == "SUBPATTERN":
            if value[1] or value[2]:
                yield "uses flags, which the backend xgrammar does not read"
            yield from _problems(list(value[3]), within_json)
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            yield from _problems(list(value[2]), within_json)


def _without_dots(pattern: str) -> str:
    """With `[^\\n\\r]` for every dot that stands for any character."""
    found, at, in_class = [], 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            found.append(pattern[at : at + 2])
            at += 2
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == ".":
            char = _ANY
        found.append(char)
        at += 1
    return "".join(found)
