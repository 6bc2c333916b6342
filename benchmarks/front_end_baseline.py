"""What `benchmarks.front_end` compares with: the usual way to write such a server around the same front end.

FastAPI checks the body, every chunk is a Pydantic object, and a StreamingResponse sends its JSON. Requests,
detokenising and the engine that costs nothing are those of Quire, so the difference is the HTTP layer alone.

    python -m benchmarks.front_end_baseline MODEL --rate 8000 [--port 0]
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from prometheus_client import REGISTRY, generate_latest
from pydantic import BaseModel

from benchmarks.front_end import null_engine
from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.config.serve import ServeConfig
from quire.frontend.async_engine import AsyncLLM
from quire.server.http.listener import bind
from quire.types.sampling import RequestOutputKind, SamplingParams


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None


class ChatChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Chunk(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[TextChoice]
    usage: Usage | None = None


class Asked(BaseModel):
    model: str | None = None
    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] = []
    max_tokens: int = 16
    stream: bool = True


def build(model: str, rate: float) -> FastAPI:
    engine: AsyncLLM | None = None
    app = FastAPI()

    @app.get("/startupz")
    async def started() -> Response:
        nonlocal engine
        engine = engine or null_engine(resolve(EngineConfig.from_flat(model=model), serving=True), rate)
        return Response()

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type="text/plain")  # the process's CPU seconds

    def stream(prompt: str | list[int], num_tokens: int, is_chat: bool) -> StreamingResponse:
        request_id, created = secrets.token_hex(12), int(time.time())
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

        def frame(choices: list[Any], usage: Usage | None = None) -> str:
            chunk = Chunk(id=request_id, object=kind, created=created, model=model, choices=choices, usage=usage)
            return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"

        async def frames() -> AsyncGenerator[str, None]:
            assert engine is not None
            num_prompt = 0
            async for output in engine.generate(prompt, params, request_id):
                num_prompt = len(output.prompt_token_ids)
                for answer in output.outputs:
                    text, reason = answer.text, answer.finish_reason
                    if is_chat:
                        yield frame([ChatChoice(index=0, delta=Delta(content=text), finish_reason=reason)])
                    else:
                        yield frame([TextChoice(index=0, text=text, finish_reason=reason)])
            total = num_prompt + num_tokens
            yield frame([], Usage(prompt_tokens=num_prompt, completion_tokens=num_tokens, total_tokens=total))
            yield "data: [DONE]\n\n"

        return StreamingResponse(frames(), media_type="text/event-stream")

    @app.post("/v1/completions")
    async def completions(asked: Asked) -> StreamingResponse:
        return stream(asked.prompt, asked.max_tokens, is_chat=False)

    @app.post("/v1/chat/completions")
    async def chat(asked: Asked) -> StreamingResponse:
        prompt = "".join(f"{message['role']}: {message['content']}\n" for message in asked.messages)
        return stream(prompt + "assistant:", asked.max_tokens, is_chat=True)

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rate", type=float, default=8000)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    listener = bind(ServeConfig(port=args.port))
    config = uvicorn.Config(build(args.model, args.rate), log_level="warning", access_log=False, loop="uvloop")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
