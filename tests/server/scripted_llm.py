"""An engine whose answer is the last message's text, byte by byte, and the formats that it is written in."""

from __future__ import annotations

from quire.frontend.reply_formats import Formats
from quire.parsers.base import REASONING_FORMATS, TOOL_FORMATS
from quire.types.output import CompletionOutput
from quire.types.sampling import SamplingParams
from tests.server.echo_llm import EchoLLM

TURN = "<|assistant|>"


class ScriptedLLM(EchoLLM):
    """Ask for as many tokens as the script has bytes: then it ends of itself, and earlier by its length."""

    def __init__(self, reasoning: str | None = None, tools: str | None = None) -> None:
        super().__init__(served_model_name=["scripted"])
        found = None if reasoning is None else REASONING_FORMATS.get(reasoning)
        self._formats = Formats(
            tools=None if tools is None else TOOL_FORMATS.get(tools),
            reasoning=found,
            start=() if found is None else tuple(found.start.encode()),
            end=() if found is None else tuple(found.end.encode()),
            end_before_calls=() if found is None else tuple(found.end_before_calls.encode()),
        )

    @property
    def formats(self) -> Formats:
        return self._formats

    @property
    def chat_template(self) -> str:
        return "{{ messages[-1].content }}" + TURN

    def _answer(self, index: int, ids: list[int], params: SamplingParams, last: bool) -> CompletionOutput:
        answer = super()._answer(index, ids, params, last)
        prompt = self.seen[-1]["prompt"]["prompt"]
        if last and params.max_tokens == len(prompt.removesuffix(TURN).encode()):
            answer.finish_reason = "stop"
        return answer
