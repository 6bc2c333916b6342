"""The fields of the endpoints that take or give token ids instead of text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from quire.foundation.errors import InputError
from quire.server.generate.protocol import INT64, ChatBody, CompletionBody, LabelledBody
from quire.server.http.body import Body


class TokenGenerateBody(LabelledBody):
    """Of /inference/v1/generate."""

    token_ids: list[Annotated[int, Field(ge=0, lt=INT64)]] = Field(min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    features: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None

    @property
    def asked_tokens(self) -> tuple[str, int] | None:
        asked = self.sampling_params.get("max_tokens")
        return ("max_tokens", asked) if isinstance(asked, int) else None

    @model_validator(mode="after")
    def _check(self) -> TokenGenerateBody:
        for name in ("features", "kv_transfer_params", "ec_transfer_params"):
            if getattr(self, name):
                raise InputError(f"{name} is not supported by this version", name)
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options needs stream=true", "stream_options")
        return self


class TokenChoice(Body):
    """One answer of /inference/v1/generate."""

    index: int = Field(0, ge=0)
    token_ids: list[int]
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class TokenResponse(Body):
    request_id: str | None = None
    choices: list[TokenChoice] = Field(min_length=1)


class ChatDerenderBody(Body):
    model: str | None = None
    generate_response: TokenResponse
    prompt_tokens: int = Field(ge=0, lt=INT64)
    chat_request: ChatBody


class CompletionDerenderBody(Body):
    model: str | None = None
    generate_responses: list[TokenResponse] = Field(min_length=1)
    prompt_tokens: list[Annotated[int, Field(ge=0, lt=INT64)]]
    completion_request: CompletionBody


class GenerativeScoringBody(LabelledBody):
    query: str | list[Annotated[int, Field(ge=0, lt=INT64)]]
    items: list[str] | list[list[Annotated[int, Field(ge=0, lt=INT64)]]] = Field(min_length=1)
    label_token_ids: list[Annotated[int, Field(ge=0, lt=INT64)]] = Field(min_length=1)
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
