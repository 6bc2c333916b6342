"""POST /inference/v1/generate: token ids in, token ids out. Nothing is rendered, tokenized or turned into text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from quire.foundation.errors import InputError
from quire.foundation.shown import shown
from quire.server.generate import generation
from quire.server.generate.generation import Generation, PromptIds
from quire.server.generate.logprobs import LogprobWriter, prompt_logprobs
from quire.server.http.body import openapi_body, read_body
from quire.server.http.long_body import Prepared
from quire.server.http.sse import ChunkWriter, EventStream, JsonReply
from quire.server.service import Service
from quire.server.tokens.protocol import TokenGenerateBody
from quire.types.output import CompletionOutput
from quire.types.request import TokenIds
from quire.types.sampling import RequestOutputKind, SamplingParams

router = APIRouter()


@router.post("/inference/v1/generate", openapi_extra=openapi_body(TokenGenerateBody))
async def generate(request: Request) -> Response:
    body = await read_body(request, TokenGenerateBody)
    service: Service = request.app.state.service
    model = service.check_model(body.model)
    asked = read_sampling_params(body.sampling_params)
    if body.stream and asked.prompt_logprobs:
        raise InputError("prompt_logprobs cannot be streamed; use stream=false", "sampling_params")
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    params = asked.clone(output_kind=kind, detokenize=bool(asked.stop))
    job = generation.start(request, body, model, [PromptIds(_ids_of(body))], params, "gen")
    job.names = {"prompt": "token_ids"}
    if body.request_id is not None:
        job.id = body.request_id
    reply = TokenReply(job, body)
    if body.stream:
        return EventStream(service.in_flight, job.num_answers, reply.frames)
    return JsonReply(service.in_flight, job.num_answers, reply.whole)


def _ids_of(body: TokenGenerateBody) -> TokenIds:
    ids: Any = body.token_ids
    return ids.take() if isinstance(ids, Prepared) else ids  # type: ignore[no-any-return]


def read_sampling_params(given: dict[str, Any]) -> SamplingParams:
    """SamplingParams written as JSON. Raises InputError naming the field that is unknown or out of range."""
    fields = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
    unknown = [name for name, value in fields.items() if name not in SamplingParams.__struct_fields__ and value]
    if unknown:
        raise InputError(f"sampling_params has the unknown field {shown(unknown[0])}", "sampling_params")
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    try:
        return msgspec.convert(fields, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise InputError(f"sampling_params: {error}", "sampling_params") from None


class TokenReply:
    """Writes the outputs of one generation as ids."""

    def __init__(self, job: Generation, body: TokenGenerateBody) -> None:
        self.job = job
        self.body = body
        self.logprobs = LogprobWriter(None, job.params, as_ids=True, top=job.params.logprobs or 0)

    async def whole(self) -> dict[str, Any]:
        job = self.job
        (output,) = [output async for _, output in job.outputs() if output.finished]
        choices = [self._choice(answer) for answer in sorted(output.outputs, key=lambda answer: answer.index)]
        return {
            "request_id": job.id,
            "model": job.model,
            "created": job.created,
            "choices": choices,
            "usage": job.usage(),
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }

    async def frames(self) -> AsyncGenerator[bytes, None]:
        job, body = self.job, self.body
        writer = ChunkWriter({"request_id": job.id}, include_usage=body.include_usage)
        async for _, output in job.outputs():
            for answer in output.outputs:
                choice = self._choice(answer)
                yield writer.chunk(choice, job.usage() if body.continuous_usage else None)
        if body.include_usage:
            yield writer.usage(job.usage())

    def _choice(self, answer: CompletionOutput) -> dict[str, Any]:
        self.job.num_generated += len(answer.token_ids)
        logprobs = None if answer.logprobs is None else self.logprobs.chat(answer)
        return {
            "index": answer.index,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": list(answer.token_ids),
            "routed_experts": None,
        }
