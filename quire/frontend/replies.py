"""What an answer is made of: reasoning first, then content and tool calls. The same for every endpoint and offline.

A `ReplyPlan` is made once a request. It says what the engine must know (which special tokens stay in the text, what
binds the answer) and makes a `ReplyParser` for each answer, which turns the text, in whatever portions it comes, into
pieces. A `Reply` is the sum of an answer's pieces.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quire.foundation.errors import InputError
from quire.foundation.marker import Marker
from quire.frontend.reply_formats import Formats
from quire.parsers.base import Parser
from quire.parsers.call_list import CALL_LIST
from quire.parsers.either import content_or_calls
from quire.types.output import Spent
from quire.types.reply import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    NamedTool,
    Piece,
    Reasoning,
    Tool,
    ToolCall,
    ToolChoice,
)
from quire.types.sampling import SamplingParams
from quire.types.structured import Constraint, GrammarSpec, Thinking


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyWish:
    """What a request asks of its answers."""

    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    max_thinking_tokens: int | None = None  # then the reasoning is ended; None: as long as the model likes
    grammar: GrammarSpec | None = None  # of the content
    close_at_limit: bool = False


class ReplyPlan:
    """`prompt` is the rendered text and `template_kwargs` what it was rendered with.

    `continued`: the text of the assistant's message that the prompt ends in, if the answer goes on with it.
    Raises InputError if the model cannot do what is wished.
    """

    def __init__(
        self,
        formats: Formats,
        wish: ReplyWish,
        prompt: str,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        continued: str | None = None,
    ) -> None:
        self.spent: Spent | None = None  # where the time that parsing takes is added up, if somebody asks
        self.wish = wish
        self._formats = formats
        self._kwargs = dict(template_kwargs or {})
        self._prompt = prompt if continued is None else self._last_marker(continued)
        self._opening = "off"
        if formats.reasoning is not None:
            self._opening = formats.reasoning.opening(self._prompt, self._kwargs)
        elif wish.max_thinking_tokens is not None:
            raise InputError(
                "max_thinking_tokens needs a model whose reasoning format is known: start it with reasoning_parser=…",
                "max_thinking_tokens",
            )

    @property
    def thinks(self) -> bool:
        """Whether an answer may hold reasoning."""
        return self._opening != "off"

    @property
    def calls(self) -> bool:
        """Whether an answer may hold tool calls."""
        wish = self.wish
        if not wish.tools or wish.tool_choice == "none":
            return False
        return wish.tool_choice != "auto" or self._formats.tools is not None

    @property
    def is_plain(self) -> bool:
        """Answers are content and nothing else: no parser is needed."""
        return not self._is_marked and not self.calls

    @property
    def _is_marked(self) -> bool:
        """Reasoning, or content in marks, is to be found."""
        return self.thinks or (self._formats.reasoning is not None and self._formats.reasoning.wraps_content)

    def params(self, params: SamplingParams) -> SamplingParams:
        """As the parsers need them: text that keeps the markers."""
        tools, keeps = self._formats.tools, self._is_marked and self._formats.special_reasoning
        if self.calls and not self._is_list and tools is not None:
            keeps = keeps or tools.needs_special_tokens
        return params.clone(skip_special_tokens=False) if keeps and params.skip_special_tokens else params

    @cached_property
    def constraint(self) -> Constraint | None:
        """What binds the answer. A grammar binds what follows the reasoning."""
        grammar = self._grammar
        limit = self.wish.max_thinking_tokens
        thinking = None
        if self.thinks and (grammar is not None or limit is not None):
            formats, state = self._formats, self._opening
            end, seam = formats.end, formats.end_seam
            if grammar is not None and not self._binds_content and self._ends_differ:
                end, seam, state = formats.end_before_calls, 0, "maybe"
            thinking = Thinking(
                start=list(formats.start),
                end=list(end),
                end_seam=seam,
                state="open" if state == "open" else "maybe",
                max_tokens=limit,
            )
        if grammar is None and thinking is None:
            return None
        return Constraint(grammar=grammar, thinking=thinking, close_at_limit=self.wish.close_at_limit)

    def parser(self) -> ReplyParser:
        reasoning = tools = None
        if self._is_marked and self._formats.reasoning is not None:
            reasoning = self._formats.reasoning.parser(
                self._prompt, self._kwargs, bound=self._binds_content, raw_calls=self.calls
            )
        if self.calls:
            tool_format = CALL_LIST if self._is_list or self._formats.tools is None else self._formats.tools
            tools = tool_format.parser(self._callable, parallel=self.wish.parallel_tool_calls)
        made = ReplyParser(
            reasoning,
            tools,
            include_reasoning=self.wish.include_reasoning,
            calls_end_it=not isinstance(self.wish.tool_choice, NamedTool),
            binds_calls=self._binds_calls,
        )
        if self.spent is not None:
            made.time(self.spent)
        return made

    def count_reasoning(self, token_ids: Sequence[int]) -> int:
        """How many tokens of an answer are its reasoning, the marker that ends it included."""
        if not self.thinks or not self._formats.end:
            return 0
        start = list(self._formats.start)
        if self._opening == "maybe" and list(token_ids[: len(start)]) != start:
            return 0
        marker, matched = Marker(self._formats.end, self._formats.end_seam), 0
        for count, token in enumerate(token_ids, 1):
            matched = marker.follow(matched, token)
            if matched == len(marker.tokens):
                return count
        return len(token_ids)

    @property
    def _callable(self) -> Sequence[Tool]:
        """The tools that this answer may call."""
        choice = self.wish.tool_choice
        if isinstance(choice, NamedTool):
            return [tool for tool in self.wish.tools if tool.name == choice.name]
        return self.wish.tools

    @cached_property
    def _own_grammar(self) -> GrammarSpec | None:
        """What holds the answer to calls in the model's own format, or calls in text to it if tools are strict."""
        if not self.calls or self._formats.tools is None:
            return None
        required = self.wish.tool_choice != "auto" or self.wish.grammar is not None
        if not required and not any(tool.strict for tool in self.wish.tools):
            return None
        return self._formats.tools.constraint(self._callable, required=required, parallel=self._is_parallel)

    @property
    def _is_parallel(self) -> bool:
        return self.wish.parallel_tool_calls and not isinstance(self.wish.tool_choice, NamedTool)

    @property
    def _is_list(self) -> bool:
        """A call is required and the model's own format has no grammar: the answer is a JSON list of calls."""
        return self.calls and self.wish.tool_choice != "auto" and self._own_grammar is None

    @cached_property
    def _grammar(self) -> GrammarSpec | None:
        """A call that is required leaves no content that another grammar could bind; one that is not is free to come
        in its stead."""
        if self._is_list:
            return CALL_LIST.constraint(self._callable, required=True, parallel=self._is_parallel)
        if self.wish.grammar is None or not self._binds_content:
            return self._own_grammar
        return content_or_calls(self.wish.grammar, None if self._ends_differ else self._own_grammar)

    @property
    def _binds_content(self) -> bool:
        return self.wish.grammar is not None and not (self.calls and self.wish.tool_choice != "auto")

    @property
    def _binds_calls(self) -> bool:
        """The answer is calls, or content of a form: then what begins a call is no content, even if it is cut there."""
        if not self.calls:
            return False
        return self._grammar is not self.wish.grammar if self._binds_content else self.wish.tool_choice != "auto"

    @property
    def _ends_differ(self) -> bool:
        """Reasoning ends otherwise before a call than before content."""
        return self._formats.end_before_calls != self._formats.end

    def _last_marker(self, text: str) -> str:
        """A prompt that ends where `text` does as far as reasoning goes: inside it, or behind it."""
        reasoning = self._formats.reasoning
        if reasoning is None:
            return text
        is_inside = text.rfind(reasoning.start) > text.rfind(reasoning.end)
        return reasoning.start if is_inside else reasoning.end


class ReplyParser:
    """Of one answer, once."""

    def __init__(
        self,
        reasoning: Parser | None,
        tools: Parser | None,
        *,
        include_reasoning: bool = True,
        calls_end_it: bool = True,
        binds_calls: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._include_reasoning = include_reasoning
        self._calls_end_it = calls_end_it
        self._binds_calls = binds_calls
        self._has_calls = False
        self._is_in_call = False
        self._cuts_call = False

    def feed(self, text: str) -> list[Piece]:
        """What `text` made certain."""
        if not text:
            return []
        if self._reasoning is None:
            return self._calls(self._tools.feed(text)) if self._tools is not None else [Content(text)]
        return self._rest(self._reasoning.feed(text))

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """The answer has ended: what was kept back. is_cut: by a limit or a stop string.

        Of an answer that is either calls or content of a form, the beginning of a call is neither.
        """
        pieces = self._rest(self._reasoning.finish()) if self._reasoning is not None else []
        if self._tools is None:
            return pieces
        kept = self._calls(self._tools.finish())
        self._cuts_call = is_cut and self._is_in_call
        if is_cut and self._binds_calls:
            kept = [piece for piece in kept if not isinstance(piece, Content) or piece.text.isspace()]
        return pieces + kept

    @property
    def has_calls(self) -> bool:
        """So far."""
        return self._has_calls

    def time(self, spent: Spent) -> None:
        """From now on `feed` and `finish` tell how long they take."""
        feed, finish = self.feed, self.finish

        def timed_feed(text: str) -> list[Piece]:
            began = time.perf_counter()
            found = feed(text)
            spent.add(time.perf_counter() - began)
            return found

        def timed_finish(*, is_cut: bool = False) -> list[Piece]:
            began = time.perf_counter()
            found = finish(is_cut=is_cut)
            spent.add(time.perf_counter() - began)
            return found

        self.feed, self.finish = timed_feed, timed_finish  # type: ignore[method-assign]

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's reason as clients expect it: an answer that ended with calls, not forced by name, says so. Not
        one that a stop string ended amid a call, whose arguments are no JSON."""
        is_of_calls = self._has_calls and self._calls_end_it and not self._cuts_call
        return "tool_calls" if reason == "stop" and is_of_calls else reason

    def _rest(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Only what is not reasoning goes to the parser of calls; without one there are no calls."""
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Reasoning):
                if self._include_reasoning:
                    found.append(piece)
            elif isinstance(piece, Content):
                found += [piece] if self._tools is None else self._calls(self._tools.feed(piece.text))
        return found

    def _calls(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if isinstance(piece, CallStart):
                self._has_calls = self._is_in_call = True
            elif isinstance(piece, CallEnd):
                self._is_in_call = False
        return pieces


@dataclass(slots=True)
class Reply:
    """The sum of an answer's pieces."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> Reply:
        for piece in pieces:
            match piece:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, call_id, name):
                    self.tool_calls.append(ToolCall(call_id, name))
                case CallArguments(index, text):
                    self.tool_calls[index].arguments += text
        return self
