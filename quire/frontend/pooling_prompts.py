"""Texts and pairs of texts → token ids, as the tokenizer frames them, cut where that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Encoding

from quire.engine.client import EngineInfo
from quire.foundation.errors import InputError
from quire.frontend.chat import ChatTemplate, render
from quire.frontend.pooling import PoolingPrompt, pooler_of
from quire.frontend.text import check_text
from quire.frontend.tokenizer import Tokenizer

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Tokens a prompt may have, its special ones included (None: no limit), and the side on which it is cut."""

    limit: int | None = None
    side: Literal["left", "right"] = "right"

    @classmethod
    def of(cls, wanted: int | None, side: Literal["left", "right"] | None, info: EngineInfo) -> Truncation:
        """wanted: the field truncate_prompt_tokens, -1 for the context. Raises InputError for what cannot be."""
        most = info.max_model_len
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or not -1 <= wanted <= most):
            raise InputError(
                f"truncate_prompt_tokens must be an integer in [-1, {most}] (max_model_len), got {wanted!r}",
                "truncate_prompt_tokens",
            )
        if side not in (None, "left", "right"):
            raise InputError(f"truncation_side must be 'left' or 'right', got {side!r}", "truncation_side")
        return cls(most if wanted == -1 else wanted, side or "right")

    def cut(self, ids: list[int]) -> list[int]:
        if self.limit is None or len(ids) <= self.limit:
            return ids
        return ids[: self.limit] if self.side == "right" else ids[len(ids) - self.limit :]


NO_TRUNCATION = Truncation()


def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    truncation: Truncation = NO_TRUNCATION,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """The ids of each text. A text that is cut keeps the special tokens around it."""
    found = tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    if truncation.limit is None:
        return found
    room = _room(tokenizer, truncation, add_special_tokens=add_special_tokens, is_pair=False)
    for index, ids in enumerate(found):
        if len(ids) > truncation.limit:
            encoding = tokenizer.raw.encode(texts[index], add_special_tokens=False)
            encoding.truncate(room, direction=truncation.side)
            found[index] = tokenizer.raw.post_process(encoding, None, add_special_tokens).ids
    return found


@dataclass(frozen=True, slots=True)
class PairEncoder:
    """How two texts become one prompt. query_limit, document_limit: tokens of each, 0 for no limit.

    template: of a decoder that was trained on questions in words; it writes the messages of roles query and document.
    """

    tokenizer: Tokenizer
    truncation: Truncation = NO_TRUNCATION
    query_limit: int = 0
    document_limit: int = 0
    template: ChatTemplate | None = None
    template_kwargs: Mapping[str, Any] | None = None

    def encode(self, pairs: Sequence[Pair]) -> list[PoolingPrompt]:
        for pair in pairs:
            for text in pair:
                check_text(text, "prompt")
        if self.template is not None:
            return [self._in_words(pair, self.template) for pair in pairs]
        raw, limit = self.tokenizer.raw, self.truncation.limit
        limited = self.query_limit or self.document_limit
        if limited:
            return [self._cut(pair) for pair in pairs]
        found = raw.encode_batch(list(pairs))
        return [
            self._cut(pair) if limit is not None and len(encoding.ids) > limit else _prompt(encoding)
            for pair, encoding in zip(pairs, found, strict=True)
        ]

    def _cut(self, pair: Pair) -> PoolingPrompt:
        raw, side = self.tokenizer.raw, self.truncation.side
        query, document = (raw.encode(text, add_special_tokens=False) for text in pair)
        for encoding, most in ((query, self.query_limit), (document, self.document_limit)):
            if most:
                encoding.truncate(most, direction=side)
        if self.truncation.limit is not None:
            room = _room(self.tokenizer, self.truncation, add_special_tokens=True, is_pair=True)
            first, second = _shares(len(query.ids), len(document.ids), room)
            query.truncate(first, direction=side)
            document.truncate(second, direction=side)
        return _prompt(raw.post_process(query, document, True))

    def _in_words(self, pair: Pair, template: ChatTemplate) -> PoolingPrompt:
        query, document = (
            self._shortened(text, most)
            for text, most in zip(pair, (self.query_limit, self.document_limit), strict=True)
        )
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        text = render(messages, None, template, add_generation_prompt=True, kwargs=self.template_kwargs)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        limit = self.truncation.limit
        if limit is not None and len(ids) > limit:
            # What follows the document must stay, so it is the document that gets shorter.
            rest = len(ids) - len(self.tokenizer.encode(document, add_special_tokens=False))
            if rest >= limit:
                raise InputError(
                    f"truncate_prompt_tokens={limit} leaves no room for a document: the query and the words around it "
                    f"have {rest} tokens",
                    "truncate_prompt_tokens",
                )
            messages[1]["content"] = self._shortened(document, limit - rest)
            text = render(messages, None, template, add_generation_prompt=True, kwargs=self.template_kwargs)
            ids = self.tokenizer.encode(text, add_special_tokens=False)[:limit]
        return PoolingPrompt(ids)

    def _shortened(self, text: str, most: int) -> str:
        if not most:
            return text
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return text if len(ids) <= most else self.tokenizer.decode(ids[:most])


def pair_template(tokenizer: Tokenizer, info: EngineInfo) -> ChatTemplate | None:
    """The chat template if it is one for pairs: it speaks of the roles query and document."""
    template = tokenizer.template
    source = "" if template is None else template.sources.get("default", "")
    speaks = all(f"'{role}'" in source or f'"{role}"' in source for role in ("query", "document"))
    return template if speaks and pooler_of(info).kind == "classify" else None


def _prompt(encoding: Encoding) -> PoolingPrompt:
    ids, types = encoding.ids, encoding.type_ids
    return PoolingPrompt(ids, types.index(1) if 1 in types else None)


def _room(tokenizer: Tokenizer, truncation: Truncation, *, add_special_tokens: bool, is_pair: bool) -> int:
    """Tokens that the limit leaves for the text itself."""
    assert truncation.limit is not None
    special = tokenizer.raw.num_special_tokens_to_add(is_pair) if add_special_tokens else 0
    if truncation.limit <= special:
        raise InputError(
            f"truncate_prompt_tokens must be more than the {special} special tokens around a prompt, "
            f"got {truncation.limit}",
            "truncate_prompt_tokens",
        )
    return truncation.limit - special


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How `room` tokens are shared by two texts: the longer one is cut first ("longest first")."""
    if first + second <= room:
        return first, second
    if min(first, second) <= room // 2:
        return (first, room - first) if first < second else (room - second, second)
    return room - room // 2, room // 2
