"""What a token spells: the alphabets of byte-level and of SentencePiece vocabularies."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer


class Pieces(dict[int, Any]):
    """Token id → piece, filled as ids are met; None for an id without a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> Any:
        token = self._tokenizer.id_to_token(token_id)
        self[token_id] = piece = None if token is None else self._piece(token)
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, its leading space kept; empty for an id without a token."""
        piece = self[token_id]
        if isinstance(piece, int):
            return bytes([piece])
        return piece.encode() if isinstance(piece, str) else piece or b""

    def _piece(self, token: str) -> Any:
        raise NotImplementedError


def _bytes_of_byte_level() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for 256, 257, …"""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _bytes_of_byte_level()
CHARACTERS = {byte: char for char, byte in _BYTES.items()}
"""What stands for each byte in such a vocabulary."""


class BytePieces(Pieces):
    """Of a `ByteLevel` decoder: a piece is bytes."""

    _byte_of = _BYTES

    def _piece(self, token: str) -> bytes:
        try:
            return bytes(self._byte_of[char] for char in token)
        except KeyError:  # an added token, spelled as plain text
            return token.encode()


class TextPieces(Pieces):
    """Of a SentencePiece-like decoder: a piece is text, or one byte (`<0xE4>`) as an int.

    strip: a character and how many of it are dropped at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, replacements: list[tuple[str, str]], strip: tuple[str, int]) -> None:
        super().__init__(tokenizer)
        self._replacements = replacements
        self.strip = strip

    def _piece(self, token: str) -> str | int:
        for old, new in self._replacements:
            token = token.replace(old, new)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return int(token[3:5], 16)
            except ValueError:
                pass
        return token


def pieces_of(tokenizer: Tokenizer) -> BytePieces | TextPieces | None:
    """The table of a tokenizer whose decoder is one of the two; None for any other decoder."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    if decoder.get("type") == "ByteLevel":
        return BytePieces(tokenizer)
    if (rules := _sentencepiece_rules(decoder)) is not None:
        return TextPieces(tokenizer, *rules)
    return None


def _sentencepiece_rules(decoder: dict[str, Any]) -> tuple[list[tuple[str, str]], tuple[str, int]] | None:
    """Replacements and start strip of a SentencePiece-like decoder; None for any other."""
    steps = list(decoder.get("decoders", [])) if decoder.get("type") == "Sequence" else []
    replacements: list[tuple[str, str]] = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    if not steps or steps.pop(0)["type"] != "ByteFallback":
        return None
    strip = ("", 0)
    if steps and steps[0]["type"] == "Fuse":
        steps.pop(0)
        if steps and steps[0]["type"] == "Strip" and steps[0]["stop"] == 0:
            step = steps.pop(0)
            strip = (step["content"], step["start"])
    return None if steps else (replacements, strip)
