"""The fields that the pooling endpoints accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from quire.foundation.errors import InputError
from quire.server.http.body import Body

INT64 = 2**63
REMOVED = {"normalize": "use_activation", "softmax": "use_activation", "activation": "use_activation"}
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
CohereType = Literal["float", "binary", "ubinary", "base64"]
Endianness = Literal["native", "little", "big"]


class PoolingBase(Body):
    """What all of them share."""

    family: ClassVar[str] = "pooling"

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=INT64)
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    priority: int = Field(0, ge=-INT64, lt=INT64)
    cache_salt: str | None = Field(None, min_length=1)
    request_id: str | None = Field(None, min_length=1, max_length=256)

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, data: Any) -> Any:
        for name, instead in REMOVED.items():
            if isinstance(data, dict) and data.get(name) is not None:
                raise InputError(f"{name} is not a field any more; use {instead}", name)
        return data


class InputBody(PoolingBase):
    """Texts, token ids or conversations."""

    input: Any = None  # checked in `parse_input`: a union here would report one error a branch
    messages: list[Any] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_of_two(self) -> InputBody:
        if (self.input is None) == (self.messages is None):
            raise InputError("give exactly one of input and messages", "input")
        return self


class EmbeddingBody(InputBody):
    instead: ClassVar[Mapping[str, str]] = {
        "embedding_types": "encoding_format",
        "input_type": "task",
        "max_tokens": "truncate_prompt_tokens",
        "output_dimension": "dimensions",
        "texts": "input",
        "truncate": "truncate_prompt_tokens and truncation_side",
    }

    encoding_format: EncodingFormat = "float"
    embed_dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"
    dimensions: int | None = Field(None, ge=1, lt=INT64)
    task: str | None = None  # what the vectors are for, as Jina's embedders know it; of /pooling, what is made


class PoolBody(EmbeddingBody):
    @model_validator(mode="after")
    def _check_pool(self) -> PoolBody:
        if self.dimensions is not None:
            raise InputError("dimensions is a field of /v1/embeddings", "dimensions")
        return self


class ClassifyBody(InputBody):
    pass


class PairBody(PoolingBase):
    max_tokens_per_query: int = Field(0, ge=0, lt=INT64)
    max_tokens_per_doc: int = Field(0, ge=0, lt=INT64)
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _refuse_template(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("chat_template") is not None:
            raise InputError("chat_template is not taken from requests that score pairs", "chat_template")
        return data


class ScoreBody(PairBody):
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    text_1: Any = None
    text_2: Any = None

    @property
    def sides(self) -> tuple[Any, Any, str, str]:
        """Both sides and their names. Raises InputError if there are not exactly two that belong together."""
        names = ("queries", "documents", "items", "data_1", "data_2", "text_1", "text_2")
        given = tuple(name for name in names if getattr(self, name) is not None)
        if given not in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")):
            raise InputError(
                "give one pair of fields: queries and documents, queries and items, data_1 and data_2, or text_1 and "
                f"text_2; got {', '.join(given) or 'none of them'}",
                given[0] if given else "queries",
            )
        return getattr(self, given[0]), getattr(self, given[1]), given[0], given[1]


class RerankBody(PairBody):
    query: Any = None
    documents: list[Any] = Field(min_length=1)
    top_n: int = Field(0, ge=0, lt=INT64)


class CohereEmbedBody(PoolingBase):
    input_type: str | None = None
    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[dict[str, Any]] | None = None
    output_dimension: int | None = Field(None, ge=1, lt=INT64)
    embedding_types: list[CohereType] = Field(["float"], min_length=1)
    truncate: Literal["END", "START", "NONE"] = "END"
    max_tokens: int | None = Field(None, ge=1, lt=INT64)
