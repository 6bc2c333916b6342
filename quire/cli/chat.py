"""quire chat [MODEL]"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from quire.cli import options
from quire.cli.talk import Message, TalkConfig, open_talker, show
from quire.foundation.errors import InputError

HELP = "Commands: /clear forgets the conversation, /quit leaves (so does Ctrl-D); Ctrl-C stops an answer."


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    system_prompt: str | None = None
    """First message of the conversation, in the role "system"."""


def run(arguments: Sequence[str]) -> int:
    values = options.parse(
        "chat",
        f"Talk to a model: here, or with --url on a server. {HELP}",
        arguments,
        (TalkConfig, ChatConfig, *options.ENGINE_SECTIONS),
        positional=("model",),
    )
    talk = options.section_of(TalkConfig, values)
    opening: list[Message] = []
    if values["system_prompt"]:
        opening = [{"role": "system", "content": values["system_prompt"]}]
    talker = open_talker(talk, options.engine_config(values))
    try:
        if talk.quick is not None:
            show(talker, [*opening, {"role": "user", "content": talk.quick}], talk)
            return 0
        print(f"{talker.name}. {HELP}")
        messages = list(opening)
        while (line := _ask()) is not None:
            if line == "/clear":
                messages = list(opening)
            elif line == "/quit":
                break
            elif line:
                messages.append({"role": "user", "content": line})
                try:
                    messages.append({"role": "assistant", "content": show(talker, messages, talk)})
                except InputError as error:  # too long, refused: the conversation goes on without this line
                    messages.pop()
                    print(f"  {error}")
        return 0
    finally:
        talker.close()


def _ask() -> str | None:
    """The user's next line; None at the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() a history and line editing
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
