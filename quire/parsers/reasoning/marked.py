"""A reasoning format that is declared: its markers, and when a model thinks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.parsers.base import Parser
from quire.parsers.reasoning.splitter import ReasoningMarkers, Splitter

Opening = Literal["open", "maybe"]
_TAIL = 128  # characters of the prompt's end that are looked at
_SWITCHES = ("thinking", "enable_thinking")  # what templates call it
_EFFORTS_OFF = ("none", "no_think")


@dataclass(frozen=True)
class MarkedReasoning:
    """What the prompt ends with decides; if it says nothing, the template's variables do.

    A prompt that ends with a start marker has begun the reasoning for the model; one that ends with an end marker
    has kept it from thinking.
    """

    markers: ReasoningMarkers
    silent: Opening = "maybe"  # how an answer begins when the model thinks and the prompt does not say so
    thinks: bool = True  # if no variable of the template says otherwise

    @property
    def start(self) -> str:
        return self.markers.starts[0]

    @property
    def end(self) -> str:
        return self.markers.ends[0]

    @property
    def end_before_calls(self) -> str:
        return self.end

    @property
    def wraps_content(self) -> bool:
        return bool(self.markers.tags)

    def opening(self, prompt: str, template_kwargs: Mapping[str, Any]) -> str:
        tail = prompt[-_TAIL:].rstrip()
        if tail.endswith(self.markers.starts):
            return "open"
        if tail.endswith(self.markers.ends):
            return "off"
        return self.silent if self._is_on(template_kwargs) else "off"

    def parser(
        self, prompt: str, template_kwargs: Mapping[str, Any], *, bound: bool = False, raw_calls: bool = False
    ) -> Parser:
        del raw_calls  # calls are always left in the content
        return Splitter(self.markers, self.opening(prompt, template_kwargs), bound=bound)

    def _is_on(self, template_kwargs: Mapping[str, Any]) -> bool:
        for name in _SWITCHES:
            if template_kwargs.get(name) is not None:
                return bool(template_kwargs[name])
        if template_kwargs.get("reasoning_effort") in _EFFORTS_OFF:
            return False
        return self.thinks


@dataclass(frozen=True)
class SuffixedReasoning(MarkedReasoning):
    """Markers whose names have a suffix that the template chooses: `<think:7f>…</think:7f>`."""

    def opening(self, prompt: str, template_kwargs: Mapping[str, Any]) -> str:
        return MarkedReasoning.opening(self._as_in(prompt), prompt, template_kwargs)

    def parser(
        self, prompt: str, template_kwargs: Mapping[str, Any], *, bound: bool = False, raw_calls: bool = False
    ) -> Parser:
        return self._as_in(prompt).parser(prompt, template_kwargs, bound=bound, raw_calls=raw_calls)

    def _as_in(self, prompt: str) -> MarkedReasoning:
        tail = prompt[-_TAIL:].rstrip()
        found = re.search(rf"</?{self.start[1:-1]}([^<>\s]+)>$", tail)
        markers = self.markers
        if found is not None:
            markers = replace(
                markers,
                starts=tuple(marker[:-1] + found[1] + ">" for marker in markers.starts),
                ends=tuple(marker[:-1] + found[1] + ">" for marker in markers.ends),
            )
        return MarkedReasoning(markers, self.silent, self.thinks)
