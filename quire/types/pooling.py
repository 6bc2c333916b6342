"""One vector (or one a token) instead of an answer: what the user asks, what goes to the core, what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import numpy as np

from quire.foundation.errors import InputError
from quire.foundation.shown import shown

EMBED, CLASSIFY, TOKEN_EMBED, TOKEN_CLASSIFY = "embed", "classify", "token_embed", "token_classify"
SPARSE_EMBED = "sparse_embed"
TASKS = (EMBED, CLASSIFY, TOKEN_EMBED, TOKEN_CLASSIFY, SPARSE_EMBED)
# Which of a model's heads makes the vectors: of whole prompts, of every token, and weights of every token beside these.
WHOLE, BY_TOKEN, WEIGHTS = 0, 1, 2
T = TypeVar("T")


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of one pooling request. Raises InputError naming a field that is out of range."""

    task: str | None = None  # one of TASKS; None: what the model was made for
    dimensions: int | None = None  # leading ones to keep, of models made for that (Matryoshka)
    use_activation: bool | None = None  # normalise, softmax, sigmoid; None: as the model was made for
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise InputError(f"task must be one of {', '.join(TASKS)}, got {shown(self.task)}", "task")
        if self.dimensions is not None and (isinstance(self.dimensions, bool) or not isinstance(self.dimensions, int)):
            raise InputError(f"dimensions must be an integer, got {shown(self.dimensions)}", "dimensions")
        if self.dimensions is not None and self.dimensions < 1:
            raise InputError(f"dimensions must be >= 1, got {self.dimensions}", "dimensions")
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise InputError(
                f"use_activation must be true or false, got {shown(self.use_activation)}", "use_activation"
            )


class Pooling(msgspec.Struct, frozen=True, array_like=True):
    """What the core and the worker must know of a pooling request. All that is done to a vector later is the front
    end's business."""

    head: int  # WHOLE, or a vector of every token by one of the model's heads for that
    second_text: int  # position where the second text of a pair begins (token type 1); the prompt's length: no pair
    num_keys: int  # leading tokens that all attend to; the prompt's length: every one (ColBERT's queries have others)

    @property
    def per_token(self) -> bool:
        return self.head != WHOLE


@dataclass(slots=True)
class PoolingOutput:
    """The vector, float32 [size]; of tasks by token [tokens, size]; of a sparse one the numbers that are not 0."""

    data: np.ndarray
    indices: np.ndarray | None = None  # of a sparse one: int32, which tokens of the vocabulary these are the weights of


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
