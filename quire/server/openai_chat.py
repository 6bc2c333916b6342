"""POST /v1/chat/completions: messages in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from quire.server import generation
from quire.server.body import openapi_body, read_body
from quire.server.chat_prompt import render_chat
from quire.server.generation import Generation, Prompt
from quire.server.logprobs import LogprobWriter, prompt_logprobs
from quire.server.params import field_names, sampling_params
from quire.server.protocol import ChatBody
from quire.server.service import Service
from quire.server.sse import TEXT, ChunkWriter, EventStream, JsonReply
from quire.types.output import CompletionOutput, RequestOutput

router = APIRouter()
ROLE = "assistant"


@router.post("/v1/chat/completions", openapi_extra=openapi_body(ChatBody))
async def chat_completions(request: Request) -> Response:
    body = await read_body(request, ChatBody)
    service: Service = request.app.state.service
    info = service.running().info
    model = service.check_model(body.model)
    defaults = info.resolved.info.generation_defaults
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    with field_names(names):
        params = sampling_params(
            body,
            defaults,
            max_tokens=defaults.get("max_tokens") if asked is None else asked,
            logprobs=body.top_logprobs if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
    text = await render_chat(service, body, _template_kwargs(body))
    ids = await generation.tokenize(service, text, add_special_tokens=body.add_special_tokens)
    prompt = Prompt(generation.truncated(ids, body, info.max_model_len), text)
    job = generation.start(request, body, model, [prompt], params, "chatcmpl")
    job.names = names
    reply = Chat(job, body)
    headers = generation.reply_headers(request, job)
    if body.stream:
        return EventStream(service.in_flight, job.num_answers, reply.frames, headers)
    return JsonReply(service.in_flight, job.num_answers, reply.whole, headers)


def _template_kwargs(body: ChatBody) -> dict[str, Any]:
    kwargs = dict(body.chat_template_kwargs)
    if body.documents is not None:
        kwargs.setdefault("documents", body.documents)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    return kwargs


class Chat:
    """Writes the outputs of one generation in the shape of the endpoint."""

    def __init__(self, job: Generation, body: ChatBody) -> None:
        self.job = job
        self.body = body
        self.logprobs: LogprobWriter = generation.logprob_writer(job.service, body, body.top_logprobs)
        self.echoed = self._last_message() if body.echo else ""
        # Text may lag behind tokens (half a character, half a stop string); such a chunk is worth sending only then.
        self.wants_all = body.logprobs or body.return_token_ids or body.continuous_usage

    async def whole(self) -> dict[str, Any]:
        final: RequestOutput | None = None
        async for _, output in self.job.outputs():
            if output.finished:
                final = output
        assert final is not None
        return await generation.build_reply([final], lambda: self._reply(final))

    def _reply(self, final: RequestOutput) -> dict[str, Any]:
        choices = [self._whole_choice(answer) for answer in sorted(final.outputs, key=lambda a: a.index)]
        self._count(final)
        reply = {**self.job.shared("chat.completion"), "choices": choices, "usage": self.job.usage()}
        reply["prompt_logprobs"] = prompt_logprobs(final.prompt_logprobs)
        if self.body.return_token_ids:
            reply["prompt_token_ids"] = final.prompt_token_ids
        return reply

    async def frames(self) -> AsyncGenerator[bytes, None]:
        job, body = self.job, self.body
        writer = ChunkWriter(job.shared("chat.completion.chunk"), include_usage=body.include_usage)
        opened = False
        around: dict[int, tuple[bytes, bytes]] = {}  # of the chunks that differ in their text only, by choice
        is_plain, counts_usage = not self.wants_all, body.continuous_usage
        async for _, output in job.outputs():
            if not opened:
                opened = True
                for index in range(job.params.n):
                    yield writer.chunk(self._opening(index, output), job.usage() if body.continuous_usage else None)
            self._count(output)
            usage = job.usage() if counts_usage else None
            for answer in output.outputs:
                if is_plain and answer.finish_reason is None:
                    if answer.index not in around:
                        around[answer.index] = writer.around(self._delta(CompletionOutput(answer.index, TEXT, [])))
                    if answer.text:
                        before, after = around[answer.index]
                        yield before + orjson.dumps(answer.text) + after
                    continue
                if answer.text or answer.finish_reason or self.wants_all:
                    yield writer.chunk(self._delta(answer), usage)
        if body.include_usage:
            yield writer.usage(job.usage())

    def _count(self, output: RequestOutput) -> None:
        for answer in output.outputs:
            self.job.num_generated += len(answer.token_ids)

    def _opening(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = {"role": ROLE, "content": self.echoed}
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _delta(self, answer: CompletionOutput) -> dict[str, Any]:
        choice = {
            "index": answer.index,
            "delta": {"content": answer.text},
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish_reason,
        }
        if answer.finish_reason is not None:
            choice["stop_reason"] = answer.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _whole_choice(self, answer: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": answer.index,
            "message": {"role": ROLE, "content": self.echoed + answer.text, "refusal": None},
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        if not self.body.logprobs or answer.logprobs is None:
            return None
        return self.logprobs.chat(answer.token_ids, answer.logprobs)

    def _last_message(self) -> str:
        last = self.body.messages[-1]
        content = last.get("content")
        return content if last.get("role") == ROLE and isinstance(content, str) else ""
