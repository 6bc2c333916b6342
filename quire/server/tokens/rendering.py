"""…/render: what a chat or completion request asks of the engine, as requests to /inference/v1/generate. …/derender:
from what that endpoint answered to the reply that the first request would have had.

So templates, tokens and parsers can live elsewhere than the engine. Both go through the code that answers requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from quire.foundation.errors import InputError
from quire.foundation.json_parts import json_parts
from quire.frontend.inputs import main_eos
from quire.frontend.outputs import Answer
from quire.frontend.structured import constraint_of
from quire.frontend.templates.chat import continued_text
from quire.frontend.tokenization.stops import stop_automaton
from quire.server.generate import generation
from quire.server.generate.chat_job import ChatJob, conversations_of
from quire.server.generate.generation import Generation, PromptIds
from quire.server.generate.protocol import ChatBody, CompletionBody, GenerationBody
from quire.server.http.body import openapi_body, read_body
from quire.server.http.sse import LongReply
from quire.server.openai.chat_reply import ChatReply
from quire.server.openai.completions import Completion, read_completion
from quire.server.service import Service
from quire.server.tokens.protocol import ChatDerenderBody, CompletionDerenderBody, TokenChoice, TokenResponse
from quire.types.output import EngineOutput, RequestOutput, TokenLogprobs
from quire.types.request import token_list
from quire.types.sampling import RequestOutputKind, SamplingParams

router = APIRouter()
AS_ID = "token_id:"


@router.post("/v1/chat/completions/render", openapi_extra=openapi_body(ChatBody))
async def render_chat(request: Request) -> Response:
    body = await read_body(request, ChatBody)
    service: Service = request.app.state.service
    model = service.check_model(body.model)
    chat = await ChatJob.read(request, body)
    [messages] = conversations_of(body)
    prompt, plan = await chat.plan(messages)
    job = generation.start(request, body, model, [prompt], plan.params(chat.params), "chatcmpl")
    (rendered,) = _requests(job, body)
    return LongReply(await json_parts(rendered))


@router.post("/v1/completions/render", openapi_extra=openapi_body(CompletionBody))
async def render_completion(request: Request) -> Response:
    body = await read_body(request, CompletionBody)
    service: Service = request.app.state.service
    model = service.check_model(body.model)
    prompts, params = await read_completion(request, body)
    job = generation.start(request, body, model, prompts, params, "cmpl")
    return LongReply(await json_parts(_requests(job, body)))


@router.post("/v1/chat/completions/derender", openapi_extra=openapi_body(ChatDerenderBody))
async def derender_chat(request: Request) -> Response:
    given = await read_body(request, ChatDerenderBody)
    service: Service = request.app.state.service
    body = given.chat_request
    model = service.check_model(given.model or body.model)
    chat = await ChatJob.read(request, body)
    prompt, plan = await chat.plan(body.messages)
    params = plan.params(chat.params)
    job = generation.start(request, body, model, [prompt], params, "chatcmpl")
    outputs = [_output(service, prompt, given.generate_response, params)]
    reply = ChatReply(job, body, [plan], continued_text(body.messages) if body.echo else "").reply(outputs)
    return LongReply(await json_parts(_counted(reply, given.prompt_tokens)))


@router.post("/v1/completions/derender", openapi_extra=openapi_body(CompletionDerenderBody))
async def derender_completion(request: Request) -> Response:
    given = await read_body(request, CompletionDerenderBody)
    service: Service = request.app.state.service
    body = given.completion_request
    model = service.check_model(given.model or body.model)
    prompts, params = await read_completion(request, body)
    if not len(given.generate_responses) == len(given.prompt_tokens) == len(prompts):
        raise InputError(
            f"generate_responses and prompt_tokens must have one entry for each of the {len(prompts)} prompts, got "
            f"{len(given.generate_responses)} and {len(given.prompt_tokens)}",
            "generate_responses",
        )
    if body.echo and params.logprobs is not None:
        raise InputError("echo cannot be derendered with logprobs: those of the prompt are not known here", "echo")
    job = generation.start(request, body, model, prompts, params, "cmpl")
    answers = zip(prompts, given.generate_responses, strict=True)
    outputs = {index: _output(service, prompt, one, params) for index, (prompt, one) in enumerate(answers)}
    return LongReply(await json_parts(_counted(Completion(job, body).reply(outputs), sum(given.prompt_tokens))))


def _requests(job: Generation, body: GenerationBody) -> list[dict[str, Any]]:
    """One for each prompt."""
    if body.use_beam_search:
        raise InputError("use_beam_search cannot be rendered: it is many requests", "use_beam_search")
    for prompt in job.prompts:
        if prompt.refusal is not None:
            raise prompt.refusal
    if any(prompt.embeds is not None for prompt in job.prompts):
        raise InputError("prompt_embeds cannot be rendered: they are no tokens", "prompt_embeds")
    if any(prompt.constraint not in (None, constraint_of(job.params.structured_outputs)) for prompt in job.prompts):
        raise InputError(
            "this request cannot be rendered: its answer is bound by more than structured_outputs (a forced tool call, "
            "a thinking budget, or a grammar that begins after the thinking)",
            "tool_choice",
        )
    params = msgspec.to_builtins(job.params, str_keys=True)
    params["max_tokens"] = job.params.max_tokens  # null is not its default
    params.pop("output_kind", None)
    return [
        {
            "request_id": job.engine_id if len(job.prompts) == 1 else f"{job.engine_id}-{index}",
            "token_ids": prompt.token_ids,
            "features": None,
            "sampling_params": params,
            "model": job.model,
            "stream": body.stream,
            "stream_options": body.stream_options,
            "cache_salt": body.cache_salt,
            "priority": body.priority,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }
        for index, prompt in enumerate(job.prompts)
    ]


def _output(service: Service, prompt: PromptIds, response: TokenResponse, params: SamplingParams) -> RequestOutput:
    """The output that the engine's tokens would have become. Raises InputError for what is no such response."""
    if len(response.choices) != params.n:
        raise InputError(
            f"generate_response must have n={params.n} choices, got {len(response.choices)}", "generate_response"
        )
    params = params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
    answers = [_answer(service, choice, params).take(delta=False) for choice in response.choices]
    return RequestOutput(response.request_id or "", prompt.text, token_list(prompt.token_ids), answers, True)


def _answer(service: Service, choice: TokenChoice, params: SamplingParams) -> Answer:
    tokenizer, info = service.tokenizer(), service.running().info
    size = info.report.vocab_size
    if any(not 0 <= token < size for token in choice.token_ids):
        raise InputError(f"token_ids must be in [0, {size})", "generate_response")
    ends = {main_eos(info, tokenizer), *info.resolved.info.eos_token_ids, *params.stop_token_ids}
    answer = Answer(choice.index, "", params, tokenizer, stop_automaton(tuple(params.stop)) if params.stop else None)
    answer.add(
        EngineOutput(
            request_id="",
            token_ids=choice.token_ids,
            logprobs=None if params.logprobs is None else _logprobs(choice, size),
            finish_reason=choice.finish_reason or "length",
            stop_reason=choice.stop_reason,
            lacks_stop_token=not choice.token_ids or choice.token_ids[-1] not in ends,
        )
    )
    return answer


def _logprobs(choice: TokenChoice, size: int) -> list[TokenLogprobs]:
    entries: Sequence[Any] = (choice.logprobs or {}).get("content") or []
    if len(entries) != len(choice.token_ids):
        raise InputError("logprobs.content must have one entry for each of the token_ids", "generate_response")
    try:
        return [_token_logprobs(entry, size) for entry in entries]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(
            'logprobs.content must hold what /inference/v1/generate answers: {"token": "token_id:N", "logprob", '
            '"top_logprobs"}',
            "generate_response",
        ) from None


def _token_logprobs(entry: dict[str, Any], size: int) -> TokenLogprobs:
    all_of_it = [entry, *entry["top_logprobs"]]
    ids = [int(one["token"].removeprefix(AS_ID)) for one in all_of_it]
    if not all(0 <= token < size for token in ids):
        raise ValueError
    logprobs = [float(one["logprob"]) for one in all_of_it]
    rank = next((rank for rank, token in enumerate(ids[1:], 1) if token == ids[0]), len(ids))
    return TokenLogprobs(ids, logprobs, rank)


def _counted(reply: dict[str, Any], num_prompt: int) -> dict[str, Any]:
    """With the prompt's tokens as they were counted where it was computed."""
    usage = reply["usage"]
    usage["prompt_tokens"], usage["total_tokens"] = num_prompt, num_prompt + usage["completion_tokens"]
    return reply
