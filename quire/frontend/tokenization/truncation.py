"""Prompts cut to a number of tokens: the fields truncate_prompt_tokens and truncation_side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.engine.client import EngineInfo
from quire.foundation.errors import ContextLengthError, InputError
from quire.frontend.text import check_text, most_chars
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.types.request import TokenIds

Side = Literal["left", "right"]
FIELD = "truncate_prompt_tokens"
_KEYS = ("add_special_tokens", FIELD, "truncation_side")


@dataclass(frozen=True, slots=True)
class Truncation:
    """Tokens a prompt may have, its special ones included (None: no limit), and the side on which it is cut."""

    limit: int | None = None
    side: Side = "right"

    @classmethod
    def of(
        cls, wanted: int | None, side: Side | None, info: EngineInfo, *, answer: int = 0, default_side: Side = "right"
    ) -> Truncation:
        """wanted: the field truncate_prompt_tokens; -1: what the context leaves beside `answer` tokens.

        Raises InputError for what cannot be.
        """
        most = info.max_model_len
        if side not in (None, "left", "right"):
            raise InputError(f"truncation_side must be 'left' or 'right', got {side!r}", "truncation_side")
        if wanted is None:
            return cls(None, side or default_side)
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not (wanted == -1 or 1 <= wanted <= most):
            raise InputError(f"{FIELD} must be -1 or an integer in [1, {most}] (max_model_len), got {wanted!r}", FIELD)
        if wanted == -1 and answer >= most:
            raise InputError(
                f"{FIELD}=-1 leaves room for the answer, and max_tokens={answer} takes all of the context of {most} "
                "tokens (max_model_len): ask for fewer",
                "max_tokens",
            )
        return cls(most - answer if wanted == -1 else wanted, side or default_side)

    @classmethod
    def of_answered(
        cls, wanted: int | None, side: Side | None, info: EngineInfo, max_tokens: int | None, min_tokens: int
    ) -> Truncation:
        """Of a prompt that is answered: its end matters most, and -1 leaves room for the answer that is asked."""
        answer = max(1, min_tokens, max_tokens or 0)
        return cls.of(wanted, side, info, answer=answer, default_side="left")

    def cut(self, ids: TokenIds) -> TokenIds:
        if self.limit is None or len(ids) <= self.limit:
            return ids
        return ids[: self.limit] if self.side == "right" else ids[len(ids) - self.limit :]

    def room(self, num_special: int) -> int:
        """Tokens that the limit leaves for the text itself."""
        assert self.limit is not None
        if self.limit <= num_special:
            raise InputError(
                f"{FIELD} must be more than the {num_special} special tokens around a prompt, got {self.limit}", FIELD
            )
        return self.limit - num_special


NO_TRUNCATION = Truncation()


def check_length(tokenizer: Tokenizer, text: str, context: int, most: int | None, *, is_cut: bool = False) -> None:
    """Raises InputError for a text that is too long by its length alone.

    most: tokens that it may have, None for any number; is_cut: whether it is cut to as many.
    """
    if most is not None and not is_cut:
        check_least_tokens(tokenizer, [text], context, most)
    if len(text) > most_chars(context):
        raise ContextLengthError.of_chars(len(text), most_chars(context), context)


def check_least_tokens(tokenizer: Tokenizer, texts: Iterable[str], context: int, most: int) -> None:
    """Raises ContextLengthError for a text that has more than `most` tokens whatever they are."""
    for text in texts:
        least = tokenizer.least_tokens(len(text))
        if least > most:
            raise ContextLengthError.of_text(len(text), least, most, context)


def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    truncation: Truncation = NO_TRUNCATION,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """The ids of each text. A text that is cut keeps the special tokens around it."""
    if truncation.limit is None:
        return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    for text in texts:
        check_text(text, "prompt")
    raw, limit = tokenizer.raw, truncation.limit
    num_special = raw.num_special_tokens_to_add(False) if add_special_tokens else 0
    found = []
    for encoding in raw.encode_batch_fast(list(texts), add_special_tokens=False):
        if len(encoding) + num_special > limit:
            encoding.truncate(truncation.room(num_special), direction=truncation.side)
        found.append(raw.post_process(encoding, None, True).ids if add_special_tokens else encoding.ids)
    return found


@dataclass(frozen=True, slots=True)
class TokenizationOptions:
    """How prompts are tokenized: what the offline class takes as arguments, or as `tokenization_kwargs`."""

    add_special_tokens: bool | None = None  # None: as the method does
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None

    @classmethod
    def of(
        cls, kwargs: Mapping[str, Any] | None, truncate_prompt_tokens: int | None = None, side: Side | None = None
    ) -> TokenizationOptions:
        """Raises InputError for keys that are unknown, or said twice."""
        said: dict[str, Any] = {FIELD: truncate_prompt_tokens, "truncation_side": side}
        given = {name: value for name, value in said.items() if value is not None}
        for name, value in (kwargs or {}).items():
            if name not in _KEYS:
                raise InputError(
                    f"tokenization_kwargs has the unknown key {name!r}; it may hold {', '.join(_KEYS)}",
                    "tokenization_kwargs",
                )
            if value is None:
                continue
            if name in given:
                raise InputError(f"{name} is given twice: as an argument and in tokenization_kwargs", name)
            given[name] = value
        special = given.get("add_special_tokens")
        if special is not None and not isinstance(special, bool):
            raise InputError(f"add_special_tokens must be true or false, got {special!r}", "add_special_tokens")
        return cls(**given)

    def special(self, default: bool) -> bool:
        return default if self.add_special_tokens is None else self.add_special_tokens


AS_USUAL = TokenizationOptions()
