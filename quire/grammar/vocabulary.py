"""What the tokens of a model spell, as a grammar sees them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from quire.foundation.errors import ConfigError
from quire.foundation.pieces import pieces_of
from quire.foundation.tokenizer_file import read_tokenizer

LONGEST_TOKEN = 255  # bytes; longer ones (runs of one character) have shorter tokens to stand for them
LONGEST_NUMBER = 32  # digits that may follow each other in a JSON number
_DIGITS = re.compile(rb"[0-9]{%d,}" % (LONGEST_NUMBER + 1))


class Vocabulary:
    """tokens: what each id spells, [size]; empty for ids that a grammar never allows by their spelling: those without
    a token, special tokens and overlong ones.

    special: the ids of special tokens by name. size: tokens that have logits.
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
        self.stop_ids = sorted(i for i in set(stop_ids) if 0 <= i < size)
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


def _spelling(token: bytes) -> bytes:
    return b"" if len(token) > LONGEST_TOKEN or _DIGITS.search(token) else token
