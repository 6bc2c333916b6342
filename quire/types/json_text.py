"""JSON that is not looked into yet."""

from __future__ import annotations


class JsonText(str):
    """The text of a JSON object, checked to be well-formed, where its value may stand."""

    __slots__ = ()
