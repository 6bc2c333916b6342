"""Regular expressions for xgrammar: what it would leave out in silence is refused, the rest is written anew.

Found by experiment with version 0.2: it ignores look-around in the patterns of schemas, and anchors within patterns,
takes line breaks for `.`, compares a pattern with the JSON text of a string, where some characters are escaped, and
lets the automata of `(ab+)?` and `a|b+` run into each other there, which `{0,1}` and `{1}` around the parts prevent.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from quire.foundation.errors import InputError
from quire.types.structured import FIELD

MAX_LENGTH = 128 * 1024  # characters of what is written
_UNKNOWN = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "back-references",
    "GROUPREF_EXISTS": "conditions",
    "POSSESSIVE_REPEAT": "possessive repeats",
    "ATOMIC_GROUP": "atomic groups",
}
_ESCAPED_IN_JSON = {0x22, 0x5C, *range(0x20)}
_OPEN_COUNT = re.compile(r"\{,[0-9]+\}")  # a count in Python, text in ECMAScript
_ANY = r"[^\n\r]"
_CLASSES = {"DIGIT": "d", "WORD": "w", "SPACE": "s"}
_SPECIAL = frozenset(r"\^$.|?*+()[]{}-/")


def rewritten(pattern: str, about: str, *, within_json: bool) -> str:
    """The pattern as xgrammar must be given it, for the whole text.

    about: what an error says it is about. within_json: it is a schema's, compared with a JSON string's text, of which
    it need match a part only. Raises InputError.
    """
    parsed = _parsed(pattern, about)
    if parsed.state.flags & ~re.UNICODE.value or _OPEN_COUNT.search(pattern):
        raise InputError(f"{about} uses flags or {{,n}}, which the backend xgrammar does not read", FIELD)
    found = _Writer(about, within_json).outermost(list(parsed))
    if len(found) > MAX_LENGTH:
        raise InputError(f"{about} is too long", FIELD)
    return found


def _parsed(pattern: str, about: str) -> Any:
    from re import _parser  # type: ignore[attr-defined]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise InputError(f"{about} cannot be read: {str(error)[:100]}", FIELD) from None


class _Writer:
    def __init__(self, about: str, within_json: bool) -> None:
        self._about = about
        self._within_json = within_json
        self._num_branches = 0  # that are open

    def outermost(self, parsed: list[Any]) -> str:
        """Anchors may stand at the ends of each branch; where one is missing, a pattern takes any text."""
        if len(parsed) == 1 and str(parsed[0][0]) == "BRANCH":
            self._num_branches += 1
            return "|".join(f"({self.outermost(list(branch))}){{1}}" for branch in parsed[0][1][1])
        is_begun = bool(parsed) and str(parsed[0][1]) == "AT_BEGINNING"
        is_ended = bool(parsed) and str(parsed[-1][1]) == "AT_END"
        inner = self._write(parsed[is_begun : len(parsed) - is_ended])
        if not self._within_json:
            return inner
        return ("" if is_begun else f"{_ANY}*") + inner + ("" if is_ended else f"{_ANY}*")

    def _write(self, parsed: Any) -> str:
        return "".join(self._item(str(operation), value) for operation, value in parsed)

    def _item(self, name: str, value: Any) -> str:
        match name:
            case "LITERAL":
                return self._literal(value)
            case "NOT_LITERAL":
                return f"[^{_in_class(value)}]"
            case "ANY":
                return _ANY
            case "IN":
                return f"[{''.join(_member(str(kind), member) for kind, member in value)}]"
            case "BRANCH":
                self._num_branches += 1
                found = f"({'|'.join(f'({self._write(branch)}){{1}}' for branch in value[1])})"
                self._num_branches -= 1
                return found
            case "SUBPATTERN":
                if value[1] or value[2]:
                    raise self._refusal("uses flags, which the backend xgrammar does not read")
                return f"({self._write(value[3])})"
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most = int(value[0]), None if str(value[1]) == "MAXREPEAT" else int(value[1])
                if self._within_json and self._num_branches and most not in (None, least) and (most or 0) > 1:
                    raise self._refusal("has a repeat of several lengths within '|', which xgrammar takes too widely")
                return f"({self._write(value[2])}){_count(least, most)}"
            case "AT":
                raise self._refusal("has an anchor within, which the backend xgrammar does not enforce")
            case _:
                raise self._refusal(f"uses {_UNKNOWN.get(name, name)}, which the backend xgrammar does not enforce")

    def _literal(self, code: int) -> str:
        if self._within_json and code in _ESCAPED_IN_JSON:
            raise self._refusal(f"has the character {chr(code)!r}, which JSON escapes: xgrammar cannot match it")
        return _in_class(code)

    def _refusal(self, what: str) -> InputError:
        return InputError(f"{self._about} {what}", FIELD)


def _count(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return f"{{{least},{most}}}"


def _member(kind: str, value: Any) -> str:
    match kind:
        case "NEGATE":
            return "^"
        case "RANGE":
            return f"{_in_class(value[0])}-{_in_class(value[1])}"
        case "CATEGORY":
            _, *negated, name = str(value).split("_")
            return "\\" + (_CLASSES[name].upper() if negated else _CLASSES[name])
        case _:
            return _in_class(value)


def _in_class(code: int) -> str:
    """A character, within a class or by itself."""
    char = chr(code)
    return f"\\{char}" if char in _SPECIAL else char if code >= 0x20 and code != 0x7F else f"\\x{code:02x}"
