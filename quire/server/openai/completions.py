"""POST /v1/completions: text or token ids in, the continuation out."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response

from quire.foundation.errors import InputError
from quire.foundation.shown import shown
from quire.frontend import prompt_embeds
from quire.frontend.structured import constraint_of
from quire.server.generate import beam_search, generation
from quire.server.generate.generation import Generation, PromptIds
from quire.server.generate.logprobs import LogprobWriter, prompt_logprobs
from quire.server.generate.params import field_names, sampling_params
from quire.server.generate.protocol import CompletionBody
from quire.server.http.body import look_into, on_thread, openapi_body, read_body
from quire.server.http.limits import MAX_PROMPTS
from quire.server.http.long_body import Prepared
from quire.server.http.sse import TEXT, ChunkWriter, EventStream, JsonReply
from quire.server.service import Service
from quire.types.output import CompletionOutput, RequestOutput
from quire.types.sampling import SamplingParams

router = APIRouter()
DEFAULT_MAX_TOKENS = 16
Echoed = tuple[str, list[int], list[Any]]  # text, ids and log-probabilities of a prompt


@router.post("/v1/completions", openapi_extra=openapi_body(CompletionBody))
async def completions(request: Request) -> Response:
    body = await read_body(request, CompletionBody)
    service: Service = request.app.state.service
    model = service.check_model(body.model)
    prompts, params = await read_completion(request, body)
    start = beam_search.start if body.use_beam_search else generation.start
    job = start(request, body, model, prompts, params, "cmpl")
    job.names = {**job.names, **_names(body)}
    reply = Completion(job, body)
    if body.stream:
        return EventStream(service.in_flight, job.num_answers, reply.frames)
    return JsonReply(service.in_flight, job.num_answers, reply.whole)


async def read_completion(request: Request, body: CompletionBody) -> tuple[list[PromptIds], SamplingParams]:
    """The prompts, cut and bound as the body asks, and how to sample. Raises InputError naming the field."""
    service: Service = request.app.state.service
    info = service.running().info
    params = sampling_params(
        body,
        info.resolved.info.generation_defaults,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1 if body.echo else 0),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs,
    )
    with field_names(_names(body)):
        constraint = await look_into(request, lambda: constraint_of(params.structured_outputs))
    cut = generation.truncation(service, body, params)
    if isinstance(body.prompt, Prepared):
        return [dataclasses.replace(prompt, constraint=constraint) for prompt in body.prompt.take()], params
    prompts = [PromptIds([0] * len(embeds), None, constraint, embeds) for embeds in await _embeds(service, body)]
    if prompts and cut.limit is not None:
        raise InputError("prompt_embeds are not cut: send fewer rows", "truncate_prompt_tokens")
    if prompts:
        return prompts, params
    given = await look_into(request, lambda: parse_prompts(body.prompt))
    texts, special = [prompt for prompt in given if isinstance(prompt, str)], body.add_special_tokens
    encoded = await generation.tokenize_all(service, texts, add_special_tokens=special, cut=cut) if texts else []
    if not texts:
        return [PromptIds(cut.cut(ids), None, constraint) for ids in given if isinstance(ids, list)], params
    for text, ids in zip(texts, encoded, strict=True):
        # The text of one that may have been cut is made of its ids.
        prompts.append(PromptIds(ids, text if cut.limit is None or len(ids) < cut.limit else None, constraint))
    return prompts, params


def _names(body: CompletionBody) -> dict[str, str]:
    """What the client calls the fields of SamplingParams."""
    return {"structured_outputs": "response_format"} if body.response_format else {}


async def _embeds(service: Service, body: CompletionBody) -> list[np.ndarray]:
    """On a thread, as they may be large; checked before anything of them is decoded."""
    given = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
    if given is None:
        return []
    prompt_embeds.check_enabled(service.running().info)
    if not 0 < len(given) <= MAX_PROMPTS:
        raise InputError(f"prompt_embeds must hold 1 to {MAX_PROMPTS} prompts, got {len(given)}", "prompt_embeds")
    return await on_thread(lambda: [prompt_embeds.decode(text) for text in given])


class Completion:
    """Writes the outputs of one generation in the shape of the endpoint."""

    def __init__(self, job: Generation, body: CompletionBody) -> None:
        self.job = job
        self.body = body
        self.prompt_only = body.echo and body.max_tokens == 0
        # Text may lag behind tokens (half a character, half a stop string); such a chunk is worth sending only then.
        self.wants_all = body.logprobs is not None or body.return_token_ids or body.continuous_usage

    async def whole(self) -> dict[str, Any]:
        final = {index: output async for index, output in self.job.outputs() if output.finished}
        return await generation.build_reply(final.values(), lambda: self.reply(final))

    def reply(self, final: dict[int, RequestOutput]) -> dict[str, Any]:
        choices = []
        for index, output in sorted(final.items()):
            echoed = self._echo(index, output) if self.body.echo else None
            for answer in sorted(output.outputs, key=lambda a: a.index):
                choice = self._choice(index, answer, echoed, self._writer())
                choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
                if self.body.return_token_ids:
                    choice["prompt_token_ids"] = output.prompt_token_ids
                choices.append(choice)
        self._count(final.values())
        return {**self.job.shared("text_completion"), "choices": choices, "usage": self.job.usage()}

    async def frames(self) -> AsyncGenerator[bytes, None]:
        job, body = self.job, self.body
        writer = ChunkWriter(job.shared("text_completion"), include_usage=body.include_usage)
        offsets: dict[int, int] = {}  # characters sent, by choice
        logprobs: dict[int, LogprobWriter | None] = {}
        around: dict[int, list[bytes]] = {}  # of the chunks that differ in their text only, by choice
        is_plain, counts_usage = not (self.wants_all or body.echo), body.continuous_usage
        async for index, output in job.outputs():
            self._count([output])
            usage = job.usage() if counts_usage else None
            for answer in output.outputs:
                number = self._number(index, answer)
                if is_plain and answer.finish_reason is None:
                    if number not in around:
                        like = CompletionOutput(answer.index, TEXT, [])
                        around[number] = writer.around(self._choice(index, like, None))
                    if answer.text:
                        yield orjson.dumps(answer.text).join(around[number])
                    continue
                echoed = None
                if number not in offsets:
                    echoed = self._echo(index, output) if body.echo else None
                    logprobs[number] = self._writer()
                choice = self._choice(index, answer, echoed, logprobs[number], offsets.get(number, 0))
                if body.return_token_ids and number not in offsets:
                    choice["prompt_token_ids"] = output.prompt_token_ids
                offsets[number] = offsets.get(number, 0) + len(choice["text"])
                if choice["text"] or answer.finish_reason or self.wants_all:
                    yield writer.chunk(choice, usage)
        if body.include_usage:
            yield writer.usage(job.usage())

    def _count(self, outputs: Any) -> None:
        if not self.prompt_only:
            for output in outputs:
                for answer in output.outputs:
                    self.job.num_generated += len(answer.token_ids)

    def _number(self, prompt_index: int, answer: CompletionOutput) -> int:
        return prompt_index * self.job.params.n + answer.index

    def _choice(
        self,
        prompt_index: int,
        answer: CompletionOutput,
        echoed: Echoed | None,
        logprobs: LogprobWriter | None = None,
        offset: int = 0,
    ) -> dict[str, Any]:
        """logprobs: what writes them, if wanted. offset: characters sent."""
        if self.prompt_only and answer.finish_reason is not None:
            answer = CompletionOutput(answer.index, "", [], finish_reason="length")
        text = answer.text if echoed is None else echoed[0] + answer.text
        choice: dict[str, Any] = {
            "index": self._number(prompt_index, answer),
            "text": text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if logprobs is not None:
            before = {} if echoed is None else logprobs.prompt(*echoed)
            lists = logprobs.completion(answer, offset + len(text))
            choice["logprobs"] = {name: before.get(name, []) + values for name, values in lists.items()}
        if self.body.return_token_ids:
            choice["token_ids"] = list(answer.token_ids)
        return choice

    def _writer(self) -> LogprobWriter | None:
        """Of one choice, if log-probabilities are wanted."""
        if self.body.logprobs is None:
            return None
        as_ids = self.body.return_tokens_as_token_ids
        return generation.logprob_writer(self.job.service, self.job.params, self.body.logprobs, as_ids=as_ids)

    def _echo(self, index: int, output: RequestOutput) -> Echoed:
        """The prompt's text, ids and log-probabilities, to stand before the answer."""
        text = self.job.prompts[index].text
        if text is None:
            tokenizer = self.job.service.running().get_tokenizer()
            text = "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids)
        return text, list(output.prompt_token_ids), list(output.prompt_logprobs or [])


def parse_prompts(value: Any) -> list[str | list[int]]:
    """One prompt or many, as text or token ids. Raises InputError naming what is wrong."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InputError(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids, "
            f"got {type(value).__name__ if value is not None else 'nothing'}",
            "prompt",
        )
    if not value:
        raise InputError("prompt must not be an empty list", "prompt")
    if type(value[0]) is int:
        return [_token_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise InputError(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(value)}", "prompt")
    if all(isinstance(item, str) for item in value):
        return value
    return [_token_ids(item, f"prompt[{i}]") for i, item in enumerate(value)]


def _token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{name} must be a non-empty list of token ids", "prompt")
    for token in value:
        if type(token) is not int or token < 0:
            raise InputError(f"{name} holds {shown(token)}, which is not a token id", "prompt")
    return value
