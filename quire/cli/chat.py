"""quire chat [MODEL]"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.cli import options
from quire.cli.conversation import COMMAND, HELP, Conversation
from quire.cli.talk import Message, TalkConfig, open_talker, show
from quire.foundation.errors import InputError
from quire.foundation.folders import cache_folder

QUOTES = '"""'
MOST_ROUNDS = 16  # of calls and their results for one question
HISTORY_LINES = 1000


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
    talker = open_talker(talk, options.engine_config(values))
    conversation = Conversation(talker, values["system_prompt"] or None)
    try:
        if talk.quick is not None:
            show(talker, [*conversation.opening(), {"role": "user", "content": talk.quick}], talk)
            return 0
        if _is_dialogue():
            _remember_lines()
            print(f"{talker.name}. {HELP}")
        _converse(conversation, talk)
        return 0
    finally:
        talker.close()


def _converse(conversation: Conversation, talk: TalkConfig) -> None:
    """Line after line until the user leaves. Ctrl-C, wherever it falls, ends what is being done and nothing else."""
    while True:
        try:
            line = _ask()
            if line is None or line in ("/quit", "/exit"):
                return
            if COMMAND.match(line):
                _command(conversation, line)
                if conversation.asks_again:
                    conversation.asks_again = False
                    _answer(conversation, conversation.messages, talk)
            elif line:
                _answer(conversation, [*conversation.messages, conversation.question(line)], talk)
        except KeyboardInterrupt:
            if not _is_dialogue():
                raise
            print("  (Ctrl-D leaves)")  # as in a shell: the line is dropped


def _command(conversation: Conversation, line: str) -> None:
    try:
        told = conversation.command(line)
    except (InputError, ValueError, KeyError, TypeError) as error:
        told = str(error) if isinstance(error, InputError) else f"{line}: not of the right form: {error!r}"
    if told:
        print(told, file=sys.stderr)


def _answer(conversation: Conversation, asked: list[Message], talk: TalkConfig) -> None:
    """Adds question and answer to the conversation, the results of calls between them; nothing if it is refused (too
    long, say)."""
    talker = conversation.talker
    try:
        for _ in range(MOST_ROUNDS):
            text = show(talker, conversation.opening() + asked, talk)
            if not talker.tool_calls:
                conversation.messages = [*asked, {"role": "assistant", "content": text}]
                return
            asked = [*asked, {"role": "assistant", "content": text or None, "tool_calls": talker.tool_calls}]
            for call in talker.tool_calls:
                function = call["function"]
                result = _read_line(f"  {function['name']}({function['arguments']}) gives: ")
                asked = [*asked, {"role": "tool", "tool_call_id": call["id"], "content": result or ""}]
        print(f"  {MOST_ROUNDS} rounds of calls without an answer: given up", file=sys.stderr)
    except InputError as error:
        print(f"  {error}", file=sys.stderr)


def _is_dialogue() -> bool:
    """Whether somebody types and reads; else only answers are printed."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _remember_lines() -> None:
    """Lines of earlier conversations come back with the arrow keys."""
    with contextlib.suppress(ImportError):
        import readline  # gives input() a history and line editing

        file = cache_folder() / "chat_history"
        with contextlib.suppress(OSError):
            readline.read_history_file(file)
        readline.set_history_length(HISTORY_LINES)
        atexit.register(_write_history, readline.write_history_file, str(file))


def _write_history(write: Callable[[str], None], file: str) -> None:
    with contextlib.suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        write(file)


def _ask() -> str | None:
    """The user's next line; one that ends with a backslash goes on, three quotes frame many. None at the end."""
    line = _read_line("> ")
    if line is None:
        return None
    if line.startswith(QUOTES):
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].endswith(QUOTES) and (more := _read_line("… ", keep_spaces=True)) is not None:
            lines.append(more)
        return "\n".join(lines).removesuffix(QUOTES).strip()
    while line.endswith("\\"):
        line = line.removesuffix("\\") + "\n" + (_read_line("… ", keep_spaces=True) or "")
    return line


def _read_line(prompt: str, *, keep_spaces: bool = False) -> str | None:
    """None at the end of input."""
    if _is_dialogue():
        try:
            line: str = input(prompt)
        except EOFError:
            print()
            return None
    else:
        line = sys.stdin.readline()
        if not line:
            return None
    return line.rstrip("\r\n") if keep_spaces else line.strip()
