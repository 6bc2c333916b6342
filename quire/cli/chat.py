"""quire chat [MODEL]"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from quire.cli import options
from quire.cli.talk import Message, TalkConfig, Talker, open_talker, show
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
        _converse(talker, opening, talk)
        return 0
    finally:
        talker.close()


def _converse(talker: Talker, opening: list[Message], talk: TalkConfig) -> None:
    """Line after line until the user leaves. Ctrl-C, wherever it falls, ends what is being done and nothing else."""
    messages = list(opening)
    while True:
        try:
            line = _ask()
            if line is None or line == "/quit":
                return
            if line == "/clear":
                messages = list(opening)
            elif COMMAND.match(line):
                print(HELP if line == "/help" else f"there is no command {line!r}. {HELP}", file=sys.stderr)
            elif line:
                messages = _answer(talker, messages, line, talk)
        except KeyboardInterrupt:
            if not _is_dialogue():
                raise
            print("  (Ctrl-D leaves)")  # as in a shell: the line is dropped


def _answer(talker: Talker, messages: list[Message], line: str, talk: TalkConfig) -> list[Message]:
    """The conversation after the answer to `line`; as it was if the line is refused (too long, say)."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        return [*asked, {"role": "assistant", "content": show(talker, asked, talk)}]
    except InputError as error:
        print(f"  {error}", file=sys.stderr)
        return messages


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
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None
