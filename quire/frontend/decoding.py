"""How token ids become text: what the tokenizer's own decoder does, but one token at a time.

The two decoders that language models use are followed exactly, from a table of pieces: the text streamed over a
sequence is the text that decoding the whole sequence gives, for *any* sequence, broken UTF-8 included.

- `ByteLevel` (GPT-2 onwards): a piece is bytes; the bytes of all pieces are read as UTF-8.
- `Replace · ByteFallback · Fuse · Strip` (SentencePiece): a piece is text, or one byte (`<0xE4>`). A run of bytes
  that is not UTF-8 as a whole becomes one U+FFFD a byte, so a run is only certain when it ends.

Any other decoder is asked again for a short window of tokens at each step.
"""

from __future__ import annotations

import codecs
import json
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """Text of one growing sequence of tokens."""

    pending: str  # complete characters that follow, unless what comes next breaks the UTF-8 of their run

    def push(self, token_id: int) -> str:
        """Add a token; the text that has become certain."""
        ...

    def flush(self) -> str:
        """The sequence has ended: the text still held back."""
        ...


class Decoding:
    """The decoder of one tokenizer, shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._pieces: _Pieces | None = None
        self.strip: tuple[str, int] = ("", 0)  # character and how many of it to drop at the start
        if decoder.get("type") == "ByteLevel":
            self._pieces = _BytePieces(tokenizer)
        elif (rules := _sentencepiece_rules(decoder)) is not None:
            replacements, self.strip = rules
            self._pieces = _TextPieces(tokenizer, replacements)

    @property
    def is_exact(self) -> bool:
        """Whether streams follow a piece table; others decode windows."""
        return self._pieces is not None

    def stream(self, *, skip_special: bool = True, spaces_between_special: bool = True) -> TextStream:
        skipped = self._special if skip_special else frozenset[int]()
        if isinstance(self._pieces, _BytePieces):
            return _ByteStream(self._pieces, skipped)
        if isinstance(self._pieces, _TextPieces):
            return _PieceStream(self._pieces, skipped, self.strip)
        squeezed = {} if skip_special or spaces_between_special else self._added
        return _WindowStream(self._tokenizer, skip_special, squeezed)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, its leading space kept; empty for an id without a token."""
        if self._pieces is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        piece = self._pieces[token_id]
        if isinstance(piece, int):
            return bytes([piece])
        return piece.encode() if isinstance(piece, str) else piece or b""


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


class _Pieces(dict[int, Any]):
    """Token id → piece, filled as ids are met; None for an id without a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> Any:
        token = self._tokenizer.id_to_token(token_id)
        self[token_id] = piece = None if token is None else self._piece(token)
        return piece

    def _piece(self, token: str) -> Any:
        raise NotImplementedError


def _bytes_of_byte_level() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for 256, 257, …"""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class _BytePieces(_Pieces):
    _byte_of = _bytes_of_byte_level()

    def _piece(self, token: str) -> bytes:
        try:
            return bytes(self._byte_of[char] for char in token)
        except KeyError:  # an added token, spelled as plain text
            return token.encode()


class _TextPieces(_Pieces):
    def __init__(self, tokenizer: Tokenizer, replacements: list[tuple[str, str]]) -> None:
        super().__init__(tokenizer)
        self._replacements = replacements

    def _piece(self, token: str) -> str | int:
        for old, new in self._replacements:
            token = token.replace(old, new)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return int(token[3:5], 16)
            except ValueError:
                pass
        return token


class _ByteStream:
    pending = ""  # an unfinished character is never complete

    def __init__(self, pieces: _BytePieces, skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._pieces[token_id] or b"")

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceStream:
    def __init__(self, pieces: _TextPieces, skipped: frozenset[int], strip: tuple[str, int]) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._strip_char, self._to_strip = strip
        self._run_length = 0  # bytes of the run that is open
        self._run_text: str | None = ""  # its characters so far; None: it cannot be UTF-8 any more
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self.pending = ""

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._add_byte(piece)
            return ""
        if self._run_length:
            piece = self._close_run() + piece
        if self._to_strip and piece:
            piece, self._to_strip = self._strip(piece)
        text: str = piece
        return text

    def flush(self) -> str:
        return self._strip(self._close_run())[0]

    def _add_byte(self, byte: int) -> None:
        self._run_length += 1
        if self._run_text is None:
            return
        try:
            self._run_text += self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._run_text = None
        self.pending = self._strip(self._run_text or "")[0]

    def _close_run(self) -> str:
        is_unfinished = bool(self._utf8.getstate()[0])
        is_text = self._run_text is not None and not is_unfinished
        text = self._run_text if is_text else REPLACEMENT * self._run_length
        self._utf8.reset()
        self._run_length, self._run_text, self.pending = 0, "", ""
        return text or ""

    def _strip(self, text: str) -> tuple[str, int]:
        """The text without the start to strip, and how many characters remain to be stripped from what follows."""
        if not self._to_strip or not text:
            return text, self._to_strip
        rest = text.lstrip(self._strip_char)
        stripped = min(len(text) - len(rest), self._to_strip)
        return text[stripped:], 0 if rest else self._to_strip - stripped


class _WindowStream:
    """Text of a new token = decode(window with it) minus decode(window without it)."""

    pending = ""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, squeezed: dict[int, str]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._squeezed = squeezed  # added tokens to join without the decoder's space
        self._ids: list[int] = []
        self._context = 0  # tokens of the window whose text is out already
        self._context_text = ""
        self._last_is_added = False

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text == self._context_text:
            self._ids.pop()  # a token without text is no context for the next
            return ""
        if text.endswith(REPLACEMENT) or len(text) < len(self._context_text):
            return ""
        delta = text[len(self._context_text) :]
        del self._ids[: self._context]
        self._context = len(self._ids)
        self._context_text = self._decode(self._ids)
        is_added = token_id in self._squeezed
        if is_added and self._last_is_added:
            delta = self._squeezed[token_id]
        self._last_is_added = is_added
        return delta

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._context_text) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
