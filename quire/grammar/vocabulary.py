"""What the tokens of a model spell, as a grammar sees them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from quire.foundation.errors import ConfigError
from quire.foundation.pieces import pieces_of
from quire.foundation.tokenizer_file import read_json, read_tokenizer

LONGEST_TOKEN = 255  # bytes; longer ones (runs of one character) have shorter tokens to stand for them
LONGEST_NUMBER = 32  # digits that may follow each other in a JSON number
_DIGITS = re.compile(rb"[0-9]{%d,}" % (LONGEST_NUMBER + 1))


class Vocabulary:
    """tokens: what each id spells, [size]; empty for ids that a grammar never allows by their spelling: those without
    a token, special tokens and overlong ones.

    special: the ids of special tokens by name. size: tokens that have logits. stop_ids: what ends an answer, the
    tokenizer's own end-of-sequence token included.
    """

    def __init__(self, folder: Path, size: int, stop_ids: Sequence[int]) -> None:
        """Raises ConfigError for a tokenizer whose tokens cannot be spelled one by one."""
        self._raw = read_tokenizer(folder)
        pieces = pieces_of(self._raw)
        if pieces is None:
            raise ConfigError(
                "structured outputs need a tokenizer with a byte-level or SentencePiece vocabulary, "
                f"which {folder}/tokenizer.json is not",
                "tokenizer",
            )
        self.size = size
        own = self._raw.token_to_id(_eos_token(folder))
        self.stop_ids = sorted(i for i in {*stop_ids, own} if i is not None and 0 <= i < size)
        if not self.stop_ids:
            raise ConfigError(
                "structured outputs need a model or a tokenizer with an end-of-sequence token", "tokenizer"
            )
        added = self._raw.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special and i < size}
        unspelled = {*self.special.values(), *self.stop_ids}
        self.tokens = [b"" if i in unspelled else _spelling(pieces.token_bytes(i)) for i in range(size)]

    def encode(self, text: str) -> list[int]:
        """The usual tokens of a text in the middle of an answer; empty if it has none of exactly this spelling."""
        ids: list[int] = self._raw.encode(text, add_special_tokens=False).ids
        if all(i < self.size for i in ids) and b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        return []


def _eos_token(folder: Path) -> str:
    """That of the tokenizer, which may be another than the model's; "" if it has none."""
    token = read_json(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _spelling(token: bytes) -> bytes:
    return b"" if len(token) > LONGEST_TOKEN or _DIGITS.search(token) else token
