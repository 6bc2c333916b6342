"""How well texts fit each other by their embeddings: of whole texts, or token by token (ColBERT)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.config.pooler import PoolerConfig
from quire.engine.client import EngineInfo
from quire.foundation.errors import InputError
from quire.frontend.pooling.requests import PoolingPrompt, pooler_of
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.frontend.tokenization.truncation import Truncation
from quire.types.pooling import EMBED, TOKEN_EMBED, PoolingOutput, PoolingRequestOutput
from quire.types.request import TokenIds

Output = PoolingRequestOutput[PoolingOutput]


def task_of(pooler: PoolerConfig) -> str:
    """What is compared."""
    return TOKEN_EMBED if pooler.late is not None else EMBED


@dataclass(frozen=True, slots=True)
class Side:
    """Queries or documents, as the model wants them framed.

    marker: token behind the first one. length: tokens at most, 0: what the context holds. mask: token that prompts are
    filled up with to that length. attends: whether the others see these. skipped: tokens that do not count.
    """

    marker: int | None = None
    length: int = 0
    mask: int | None = None
    attends: bool = True
    skipped: tuple[int, ...] = ()

    def cut(self, cut: Truncation, most: int = 0) -> Truncation:
        """How the texts are cut, their special tokens included. most: tokens, 0 for any number."""
        limits = [limit for limit in (cut.limit, most, self.length) if limit]
        return Truncation(min(limits) - (self.marker is not None) if limits else None, cut.side)

    def prompt(self, ids: TokenIds, cache_salt: str | None = None) -> PoolingPrompt:
        found = [int(token) for token in ids]
        if self.marker is not None:
            found.insert(1, self.marker)
        num_keys = len(found)
        if self.mask is not None:
            found += [self.mask] * (self.length - len(found))
        return PoolingPrompt(found, None, cache_salt, None if self.attends else num_keys)

    def counted(self, output: Output) -> np.ndarray:
        """The vectors that are compared."""
        data = output.outputs.data
        if not self.skipped:
            return data
        kept: np.ndarray = data[~np.isin(output.prompt_token_ids, self.skipped)]
        return kept


def sides(info: EngineInfo, tokenizer: Tokenizer) -> tuple[Side, Side]:
    """Of queries and of documents. Raises InputError if the tokenizer lacks a token that the model was made with."""
    late = pooler_of(info).late
    if late is None:
        return Side(), Side()
    mask = _token(tokenizer, tokenizer.special_tokens.get("mask_token", "[MASK]")) if late.expands else None
    skipped = (tokenizer.raw.token_to_id(word) for word in late.skipped)
    most = info.max_model_len
    query = Side(_marker(tokenizer, late.query[0]), min(late.query[1], most), mask, late.attends)
    document = Side(
        _marker(tokenizer, late.document[0]),
        min(late.document[1], most),
        skipped=tuple(token for token in skipped if token is not None),
    )
    return query, document


def _marker(tokenizer: Tokenizer, token: str) -> int | None:
    return _token(tokenizer, token) if token else None


def _token(tokenizer: Tokenizer, token: str) -> int:
    found: int | None = tokenizer.raw.token_to_id(token)
    if found is None:
        raise InputError(f"the tokenizer has no token {token!r}, which the model's files name", "model")
    return found


def similarity(pooler: PoolerConfig, query: np.ndarray, document: np.ndarray) -> float:
    """query, document: float32 [size], or of tokens [tokens, size]."""
    return _BY_NAME[pooler.similarity](query, document)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)


def _max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """The sum over the query's tokens of each one's largest product with a token of the document."""
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0


_BY_NAME: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "cosine": _cosine,
    "dot": lambda a, b: float(a @ b),
    "euclidean": lambda a, b: -float(np.linalg.norm(a - b)),
    "manhattan": lambda a, b: -float(np.abs(a - b).sum()),
    "maxsim": _max_sim,
}
