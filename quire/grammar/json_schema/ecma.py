"""Patterns of JSON schemas: `.` and `\\S` as ECMAScript has them, which is what JSON Schema refers to.

Regex libraries let `.` take three of the four line ends, and `\\S` (with ASCII classes) all white space beyond ASCII.
"""

from __future__ import annotations

ANY = "[^\n\r\u2028\u2029]"
_WIDE_SPACE = "\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"  # U+0085 is none, but to others
NOT_SPACE = rf"[^\s{_WIDE_SPACE}]"


def spelled_out(pattern: str) -> str:
    """With classes in their stead, outside of classes; there `\\S` stays, for `[\\s\\S]` means anything."""
    found, at, in_class = [], 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            pair = pattern[at : at + 2]
            found.append(NOT_SPACE if pair == r"\S" and not in_class else pair)
            at += 2
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == ".":
            char = ANY
        found.append(char)
        at += 1
    return "".join(found)
