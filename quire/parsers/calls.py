"""Where a layout puts what it reads: the pieces of an answer in order, calls numbered and named once."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from quire.types.reply import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning


def new_call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


class PieceBuilder:
    """Collects pieces. With `parallel` False all calls but the first are read and dropped."""

    __slots__ = ("_count", "_ids", "_muted", "_new_id", "_parallel", "_pieces", "has_content")

    def __init__(self, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> None:
        self._pieces: list[Piece] = []
        self.has_content = False  # any has come
        self._new_id = new_id
        self._count = 0  # calls begun
        self._ids: set[str] = set()
        self._parallel = parallel
        self._muted = False  # inside a call that is dropped

    def drain(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def content(self, text: str) -> None:
        if text:
            self.has_content = True
            last = self._pieces[-1] if self._pieces else None
            if type(last) is Content:
                self._pieces[-1] = Content(last.text + text)
            else:
                self._pieces.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text))

    def start(self, name: str, call_id: str | None = None) -> None:
        self._muted = self._count > 0 and not self._parallel
        if not self._muted:
            if not call_id or call_id in self._ids:  # those that a model writes may come twice
                call_id = self._new_id()
            self._ids.add(call_id)
            self._pieces.append(CallStart(self._count, call_id, name.encode(errors="replace").decode()))
        self._count += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call begun last."""
        if self._muted or not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if type(last) is CallArguments:
            self._pieces[-1] = CallArguments(last.index, last.text + text)
        else:
            self._pieces.append(CallArguments(self._count - 1, text))

    def end(self) -> None:
        if not self._muted:
            self._pieces.append(CallEnd(self._count - 1))
