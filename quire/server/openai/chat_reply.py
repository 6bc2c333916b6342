"""The reply of the chat endpoint: an answer's pieces as one message, or as deltas that add up to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import orjson

from quire.frontend.replies import Reply, ReplyParser, ReplyPlan
from quire.server.generate import generation
from quire.server.generate.generation import Generation
from quire.server.generate.logprobs import LogprobWriter, prompt_logprobs
from quire.server.generate.protocol import ChatFields
from quire.server.http.sse import TEXT, ChunkWriter
from quire.types.output import CompletionOutput, RequestOutput
from quire.types.reply import CallArguments, CallStart, Content, Piece, Reasoning

ROLE = "assistant"


class ChatReply:
    """Writes the outputs of one generation. `plans`: one a prompt; only the reply as a whole may have several.

    `echoed`: text that the content begins with.
    """

    def __init__(self, job: Generation, body: ChatFields, plans: Sequence[ReplyPlan], echoed: str = "") -> None:
        self.job = job
        self.body = body
        self.plans = plans
        self.echoed = echoed
        top = body.top_logprobs if body.logprob_token_ids is None else -1  # all that were listed
        self._top = top
        # Text may lag behind tokens (half a character, half a stop string); such a chunk is worth sending only then.
        self.wants_all = body.logprobs or body.return_token_ids or body.continuous_usage
        if any(plan.thinks for plan in plans):
            job.num_reasoning = 0

    # As a whole

    async def whole(self) -> dict[str, Any]:
        finals = {index: output async for index, output in self.job.outputs() if output.finished}
        outputs = [finals[index] for index in sorted(finals)]
        return await generation.build_reply(outputs, lambda: self.reply(outputs))

    def reply(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for plan, output in zip(self.plans, outputs, strict=True):
            for answer in sorted(output.outputs, key=lambda answer: answer.index):
                self._count(answer)
                self._count_reasoning(plan, answer.token_ids)
                choices.append(self._whole_choice(plan, len(choices), answer))
        reply = {**self.job.shared("chat.completion"), "choices": choices, "usage": self.job.usage()}
        reply["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_logprobs) if len(outputs) == 1 else None
        return reply | self._prompt(outputs[0])

    def _prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What a reply, or the first chunk of each choice, tells of the prompt."""
        told: dict[str, Any] = {}
        if self.body.return_token_ids:
            told["prompt_token_ids"] = output.prompt_token_ids
        if self.body.return_prompt_text:
            told["prompt_text"] = self.job.prompts[0].text
        return told

    def _whole_choice(self, plan: ReplyPlan, index: int, answer: CompletionOutput) -> dict[str, Any]:
        finish_reason = answer.finish_reason
        if plan.is_plain:
            found = Reply(content=answer.text)
        else:
            parser = plan.parser()
            found = Reply().add(parser.feed(answer.text)).add(parser.finish(is_cut=answer.is_cut))
            finish_reason = parser.finish_reason(finish_reason)
            self.job.note_calls(plan, found=parser.has_calls)
        content = self.echoed + found.content
        message: dict[str, Any] = {
            "role": ROLE,
            "content": content if content or plan.is_plain else None,
            "refusal": None,
            "reasoning": found.reasoning or None,
            "reasoning_content": found.reasoning or None,
        }
        if found.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in found.tool_calls
            ]
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(self._writer(), answer),
            "finish_reason": finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    # As a stream

    async def frames(self) -> AsyncGenerator[bytes, None]:
        job, body, plan = self.job, self.body, self.plans[0]
        writer = ChunkWriter(job.shared("chat.completion.chunk"), include_usage=body.include_usage)
        streams: dict[int, _Stream] = {}
        wants_all, is_plain, counts_usage = self.wants_all, plan.is_plain, body.continuous_usage
        async for _, output in job.outputs():
            if not streams:
                for index in range(job.params.n):
                    streams[index] = _Stream(plan, index, writer, self._writer())
                    usage = job.usage() if counts_usage else None
                    yield writer.chunk(self._opening(index), usage, self._prompt(output))
            for answer in output.outputs:
                stream = streams[answer.index]
                self._count(answer)
                if wants_all or answer.finish_reason is not None:
                    choice = self._streamed_choice(stream, answer)
                    yield writer.chunk(choice, job.usage() if counts_usage else None)
                elif is_plain:
                    if answer.text:
                        yield orjson.dumps(answer.text).join(stream.around_content)
                else:
                    for frame in stream.frames(answer):
                        yield frame
        if body.include_usage:
            yield writer.usage(job.usage())

    def _opening(self, index: int) -> dict[str, Any]:
        content = self.echoed if self.echoed or self.plans[0].is_plain else None
        return {
            "index": index,
            "delta": {"role": ROLE, "content": content},
            "logprobs": None,
            "finish_reason": None,
        }

    def _streamed_choice(self, stream: _Stream, answer: CompletionOutput) -> dict[str, Any]:
        """A chunk that has more to tell than its text: the last one, or with log-probabilities."""
        finish_reason = answer.finish_reason
        if stream.parser is None:
            delta: dict[str, Any] = {"content": answer.text}
        else:
            pieces = stream.feed(answer)
            if finish_reason is not None:
                pieces += stream.parser.finish(is_cut=answer.is_cut)
                finish_reason = stream.parser.finish_reason(finish_reason)
                self.job.note_calls(self.plans[0], found=stream.parser.has_calls)
                self._count_reasoning(self.plans[0], stream.token_ids)
            delta = _delta(pieces)
        choice = {
            "index": answer.index,
            "delta": delta,
            "logprobs": self._logprobs(stream.logprobs, answer),
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = answer.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    # Both

    def _count(self, answer: CompletionOutput) -> None:
        self.job.num_generated += len(answer.token_ids)

    def _count_reasoning(self, plan: ReplyPlan, token_ids: Sequence[int]) -> None:
        if self.job.num_reasoning is not None:
            self.job.num_reasoning += plan.count_reasoning(token_ids)

    def _writer(self) -> LogprobWriter | None:
        """Of one answer, if log-probabilities are wanted."""
        if not self.body.logprobs:
            return None
        as_ids = self.body.return_tokens_as_token_ids
        return generation.logprob_writer(self.job.service, self.job.params, self._top, as_ids=as_ids)

    def _logprobs(self, writer: LogprobWriter | None, answer: CompletionOutput) -> dict[str, Any] | None:
        return None if writer is None or answer.logprobs is None else writer.chat(answer)


class _Stream:
    """One answer being streamed. Chunks with nothing but text are written around it, serialised once."""

    def __init__(self, plan: ReplyPlan, index: int, writer: ChunkWriter, logprobs: LogprobWriter | None) -> None:
        self.logprobs = logprobs
        self.parser: ReplyParser | None = None if plan.is_plain else plan.parser()
        self.token_ids: list[int] = []  # so far, if reasoning among them is to be counted
        self.around_content = writer.around(_choice(index, _delta([Content(TEXT)])))
        self._around_reasoning = writer.around(_choice(index, _delta([Reasoning(TEXT)])))
        self._thinks = plan.thinks
        self._index = index
        self._writer = writer

    def feed(self, answer: CompletionOutput) -> list[Piece]:
        assert self.parser is not None
        if self._thinks:
            self.token_ids += answer.token_ids
        return self.parser.feed(answer.text)

    def frames(self, answer: CompletionOutput) -> list[bytes]:
        frames = []
        for piece in self.feed(answer):
            if isinstance(piece, Content):
                frames.append(orjson.dumps(piece.text).join(self.around_content))
            elif isinstance(piece, Reasoning):
                frames.append(orjson.dumps(piece.text).join(self._around_reasoning))
            elif delta := _delta([piece]):
                frames.append(self._writer.chunk(_choice(self._index, delta)))
        return frames


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Of pieces that come together. The name and the id of a call are said once."""
    delta: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + text
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls.append({"index": index, "id": call_id, "type": "function", "function": function})
            case CallArguments(index, text):
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = calls
    return delta
