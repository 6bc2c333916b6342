"""Pairs of texts → token ids, as the tokenizer frames them, cut where that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Encoding

from quire.engine.client import EngineInfo
from quire.foundation.errors import InputError
from quire.frontend.pooling.requests import PoolingPrompt, pooler_of
from quire.frontend.templates.chat import ChatTemplate, render
from quire.frontend.text import check_text
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.frontend.tokenization.truncation import NO_TRUNCATION, Truncation

Pair = tuple[str, str]
_INSTRUCTION = "instruction"


@dataclass(frozen=True, slots=True)
class PairEncoder:
    """How two texts become one prompt. query_limit, document_limit: tokens of each, 0 for no limit.

    template: of a decoder that was trained on questions in words; it writes the messages of roles query and document.
    instruction: what makes a document fit; it takes a template that has a variable of this name or a system message.
    """

    tokenizer: Tokenizer
    truncation: Truncation = NO_TRUNCATION
    query_limit: int = 0
    document_limit: int = 0
    template: ChatTemplate | None = None
    template_kwargs: Mapping[str, Any] | None = None
    instruction: str | None = None

    def __post_init__(self) -> None:
        """Raises InputError for an instruction that nobody would read."""
        if self.instruction is not None and not (self._names_instruction or self._has_system):
            raise InputError(
                "instruction needs a model whose chat template for pairs reads an instruction", "instruction"
            )

    @property
    def _names_instruction(self) -> bool:
        return self.template is not None and _INSTRUCTION in self.template.pick(with_tools=False).forms.variables

    @property
    def _has_system(self) -> bool:
        return self.template is not None and _speaks_of(self.template, "system")

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
        query, document = raw.encode_batch(list(pair), add_special_tokens=False)
        for encoding, most in ((query, self.query_limit), (document, self.document_limit)):
            if most:
                encoding.truncate(most, direction=side)
        if self.truncation.limit is not None:
            room = self.truncation.room(raw.num_special_tokens_to_add(True))
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
        kwargs = dict(self.template_kwargs or {})
        if self.instruction is not None and self._names_instruction:
            kwargs.setdefault(_INSTRUCTION, self.instruction)
        elif self.instruction is not None:
            messages.insert(0, {"role": "system", "content": self.instruction})
        text = render(messages, None, template, add_generation_prompt=True, kwargs=kwargs)
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
            messages[-1]["content"] = self._shortened(document, limit - rest)
            text = render(messages, None, template, add_generation_prompt=True, kwargs=kwargs)
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
    speaks = template is not None and _speaks_of(template, "query") and _speaks_of(template, "document")
    return template if speaks and pooler_of(info).kind == "classify" else None


def _speaks_of(template: ChatTemplate, role: str) -> bool:
    source = template.sources.get("default", "")
    return f"'{role}'" in source or f'"{role}"' in source


def _prompt(encoding: Encoding) -> PoolingPrompt:
    ids, types = encoding.ids, encoding.type_ids
    return PoolingPrompt(ids, types.index(1) if 1 in types else None)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How `room` tokens are shared by two texts: the longer one is cut first ("longest first")."""
    if first + second <= room:
        return first, second
    if min(first, second) <= room // 2:
        return (first, room - first) if first < second else (room - second, second)
    return room - room // 2, room // 2
