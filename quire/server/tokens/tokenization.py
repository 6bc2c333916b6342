"""POST /tokenize and /detokenize: the same tokens that generation would see. GET /tokenizer_info."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.foundation.aside import LONG, aside
from quire.foundation.errors import InputError
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.server.generate.chat_prompt import render_chat, template_kwargs
from quire.server.generate.protocol import DetokenizeBody, TokenizeBody
from quire.server.http.body import openapi_body, read_body
from quire.server.http.errors import ApiError
from quire.server.http.long_body import Prepared
from quire.server.http.sse import LongReply
from quire.server.service import Service
from quire.types.request import TokenIds

router = APIRouter()


@router.post("/tokenize", openapi_extra=openapi_body(TokenizeBody))
async def tokenize(request: Request) -> Response:
    body = await read_body(request, TokenizeBody)
    service: Service = request.app.state.service
    service.running()
    service.check_model(body.model)
    if isinstance(body.prompt, Prepared):
        return LongReply(memoryview(body.prompt.take()))
    return LongReply(await tokenized(request, body))


async def tokenized(request: Request, body: TokenizeBody) -> bytes:
    """The reply."""
    service: Service = request.app.state.service
    engine, special = service.running(), body.add_special_tokens
    if body.messages is not None:
        text = await render_chat(service, body, template_kwargs(service, body), messages=body.messages)
        ids = await service.encoder.tokens(text, add_special_tokens=bool(special))
    else:
        assert body.prompt is not None
        ids = await service.encoder.tokens(body.prompt, add_special_tokens=special is not False)
    tokenizer = service.tokenizer() if body.return_token_strs else None
    write = partial(_reply, ids, engine.info.max_model_len, tokenizer)
    return await aside(write, len(ids))


def _reply(ids: TokenIds, context: int, tokenizer: Tokenizer | None) -> bytes:
    """Written in pieces, between which a thread lets others go on. tokenizer: for the text of each token."""
    pieces = [ids[start : start + LONG] for start in range(0, len(ids), LONG)]
    tokens = [_dump(piece.tolist() if isinstance(piece, np.ndarray) else piece) for piece in pieces]
    strings = b"null"
    if tokenizer is not None:
        spelled = (tokenizer.convert_ids_to_tokens([int(i) for i in piece]) for piece in pieces)
        strings = b"[%b]" % b",".join(map(_dump, spelled))
    return b'{"count":%d,"max_model_len":%d,"tokens":[%b],"token_strs":%b}' % (
        len(ids),
        context,
        b",".join(tokens),
        strings,
    )


def _dump(items: Sequence[int | str | None]) -> bytes:
    """What stands between the brackets of a list."""
    return orjson.dumps(items)[1:-1]


@router.post("/detokenize", openapi_extra=openapi_body(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    body = await read_body(request, DetokenizeBody)
    service: Service = request.app.state.service
    service.running()
    service.check_model(body.model)
    if isinstance(body.tokens, Prepared):
        return LongReply(memoryview(body.tokens.take()))
    return LongReply(await aside(partial(detokenized, service, body.tokens), len(body.tokens)))


def detokenized(service: Service, tokens: list[int]) -> bytes:
    """The reply. Raises InputError."""
    vocab, tokenizer = service.running().info.resolved.info.vocab_size, service.tokenizer()
    for token in tokens:
        if not 0 <= token < vocab:
            raise InputError(f"tokens must be in [0, {vocab}), got {token}", "tokens")
    return orjson.dumps({"prompt": tokenizer.decode(tokens)})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """What tokenizer_config.json says, and the chat template that is used. Only if the server was told to tell."""
    service: Service = request.app.state.service
    if not service.serve.enable_tokenizer_info_endpoint:
        raise ApiError(404, "there is no /tokenizer_info: the server runs without enable_tokenizer_info_endpoint")
    tokenizer = service.tokenizer()
    template = {} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}
    return JSONResponse({"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.config, **template})
