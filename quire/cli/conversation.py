"""A conversation with its commands: what `/system`, `/params`, `/save` and the others do to it."""

from __future__ import annotations

import base64
import json
import mimetypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.cli.talk import Local, Message, Talker
from quire.foundation.errors import InputError

HELP = "Commands: /help, /clear forgets the conversation, /quit leaves (so does Ctrl-D); Ctrl-C stops an answer."
MORE = """
  /system [TEXT]        show, or set, what the model is told first; "-" takes it away
  /params [NAME=VALUE]  show, or set, sampling parameters (temperature=0.7 max_tokens=200); NAME= takes one away
  /retry                ask the last question again
  /undo                 forget the last question and its answer
  /image FILE           send an image with the next line (a server with a model that sees)
  /tools FILE           JSON list of tools that the model may call (a server); you are asked for what they give
  /save FILE            write the conversation: .md to be read, else JSON
  /load FILE            take up a conversation that /save has written
  A line that ends with \\ goes on; three quotes begin and end a text of many lines."""
COMMAND = re.compile(r"/\w*(?=\s|$)")  # at the beginning of a line; a path (/etc/hosts) is none


@dataclass
class Conversation:
    talker: Talker
    system: str | None = None
    messages: list[Message] = field(default_factory=list)  # without the system's
    images: list[str] = field(default_factory=list)  # data URLs for the next question
    asks_again: bool = False  # the last question waits for another answer

    def opening(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def question(self, text: str) -> Message:
        """What the user says next, with the images that were attached."""
        images, self.images = self.images, []
        if not images:
            return {"role": "user", "content": text}
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    def command(self, line: str) -> str:
        """Do what `/name rest` says; returns what to tell. Raises InputError for what cannot be done."""
        name, _, rest = line.partition(" ")
        found: Callable[[str], str] | None = {
            "/help": lambda _: HELP + MORE,
            "/clear": self._clear,
            "/system": self._system,
            "/params": self._params,
            "/retry": self._retry,
            "/undo": self._undo,
            "/image": self._image,
            "/tools": self._tools,
            "/save": self._save,
            "/load": self._load,
        }.get(name)
        return f"there is no command {line!r}. {HELP}" if found is None else found(rest.strip())

    def _clear(self, _rest: str) -> str:
        self.messages, self.images = [], []
        return ""

    def _system(self, rest: str) -> str:
        if rest:
            self.system = None if rest == "-" else rest
        return f"system: {self.system or 'nothing'}"

    def _params(self, rest: str) -> str:
        settings = self.talker.settings
        for word in rest.split():
            name, equals, value = word.partition("=")
            if not equals or not name:
                raise InputError(f"/params takes NAME=VALUE, got {word!r}")
            if not value:
                settings.pop(name, None)
                continue
            try:
                settings[name] = json.loads(value)
            except ValueError:
                settings[name] = value
        shown = {name: value for name, value in settings.items() if value is not None and name != "tools"}
        return "  ".join(f"{name}={json.dumps(value)}" for name, value in shown.items()) or "the model's own"

    def _retry(self, _rest: str) -> str:
        self._drop_answer()
        if not self.messages:
            raise InputError("nothing was asked yet")
        self.asks_again = True
        return ""

    def _undo(self, _rest: str) -> str:
        self._drop_answer()
        if self.messages:
            self.messages.pop()
        return f"{sum(message['role'] == 'user' for message in self.messages)} questions are left"

    def _drop_answer(self) -> None:
        """All that came after the last question."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()

    def _image(self, rest: str) -> str:
        self._needs_server("/image")
        kind = mimetypes.guess_type(rest)[0] or ""
        if not kind.startswith("image/"):
            raise InputError(f"/image takes an image (.png, .jpg, .webp …), got {rest!r}")
        self.images.append(f"data:{kind};base64,{base64.b64encode(_read(rest)).decode()}")
        return f"{rest} goes with your next line"

    def _tools(self, rest: str) -> str:
        self._needs_server("/tools")
        if rest == "-":
            self.talker.settings.pop("tools", None)
            return "no tools"
        tools = json.loads(_read(rest))
        tools = tools if isinstance(tools, list) else [tools]
        # A bare function is wrapped.
        self.talker.settings["tools"] = [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
        ]
        return "tools: " + ", ".join(tool["function"]["name"] for tool in self.talker.settings["tools"])

    def _needs_server(self, name: str) -> None:
        if isinstance(self.talker, Local):
            raise InputError(f"{name} needs a server: start one with `quire serve` and talk to it with --url")

    def _save(self, rest: str) -> str:
        everything = self.opening() + self.messages
        if rest.endswith(".md"):
            text = "\n".join(f"**{m['role']}**\n\n{_text_of(m)}\n" for m in everything)
        else:
            settings = {name: value for name, value in self.talker.settings.items() if value is not None}
            text = json.dumps({"messages": everything, "settings": settings}, indent=2, ensure_ascii=False) + "\n"
        try:
            Path(rest).expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{rest!r} cannot be written: {error.strerror}") from None
        return f"{len(everything)} messages in {rest}"

    def _load(self, rest: str) -> str:
        found = json.loads(_read(rest))
        if not isinstance(found, dict) or not isinstance(found.get("messages"), list):
            raise InputError(f"{rest!r} is no conversation: it has no messages")
        messages = found["messages"]
        is_opened = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if is_opened else None
        self.messages = messages[1:] if is_opened else messages
        self.talker.settings.update(found.get("settings") or {})
        return f"{len(messages)} messages"


def _read(name: str) -> bytes:
    try:
        return Path(name).expanduser().read_bytes()
    except OSError as error:
        raise InputError(f"{name!r} cannot be read: {error.strerror}") from None


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part.get("text") or f"[{part['type']}]" for part in content)
    calls = [f"calls `{c['function']['name']}({c['function']['arguments']})`" for c in message.get("tool_calls") or ()]
    return "\n".join([*([content] if content else []), *calls])
