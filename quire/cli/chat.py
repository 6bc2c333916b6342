"""quire chat [MODEL]"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from quire.cli import options
from quire.cli.talk import Message, TalkConfig, open_talker, show
from quire.foundation.errors import InputError

HELP = "Commands: /help, /clear forgets the conversation, /quit leaves (so does Ctrl-D); Ctrl-C stops an answer."
COMMAND = re.compile(r"/\w*(?=\s|$)")  # at the beginning of a line; a path (/etc/hosts) is none


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
        defaults={"disable_log_stats": True},  # the engine's statistics would stand in the middle of answers
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
        if _is_dialogue():
            print(f"{talker.name}. {HELP}")
        messages = list(opening)
        while (line := _ask()) is not None:
            command = COMMAND.match(line)
            if command is not None and line == "/clear":
                messages = list(opening)
            elif command is not None and line == "/quit":
                break
            elif command is not None:
                print(HELP if line == "/help" else f"there is no command {line!r}. {HELP}", file=sys.stderr)
            elif line:
                messages.append({"role": "user", "content": line})
                try:
                    messages.append({"role": "assistant", "content": show(talker, messages, talk)})
                except InputError as error:  # too long, refused: the conversation goes on without this line
                    messages.pop()
                    print(f"  {error}", file=sys.stderr)
        return 0
    finally:
        talker.close()


def _is_dialogue() -> bool:
    """Whether somebody types and reads; else only answers are printed."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask() -> str | None:
    """The user's next line; None at the end of input."""
    if not _is_dialogue():
        line = sys.stdin.readline()
        return line.strip() if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() a history and line editing
    while True:
        try:
            return input("> ").strip()
        except KeyboardInterrupt:
            print("  (Ctrl-D leaves)")  # as in a shell: the line is dropped
        except EOFError:
            print()
            return None
