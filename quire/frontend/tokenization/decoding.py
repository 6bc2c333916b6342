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
from typing import Protocol

from tokenizers import Tokenizer

from quire.foundation.pieces import BytePieces, TextPieces, pieces_of

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
        self._pieces = pieces_of(tokenizer)

    @property
    def is_exact(self) -> bool:
        """Whether streams follow a piece table; others decode windows."""
        return self._pieces is not None

    def stream(self, *, skip_special: bool = True, spaces_between_special: bool = True) -> TextStream:
        skipped = self._special if skip_special else frozenset[int]()
        if isinstance(self._pieces, BytePieces):
            return _ByteStream(self._pieces, skipped)
        if isinstance(self._pieces, TextPieces):
            return _PieceStream(self._pieces, skipped)
        squeezed = {} if skip_special or spaces_between_special else self._added
        return _WindowStream(self._tokenizer, skip_special, squeezed)

    def spelling(self, *, skip_special: bool = True, spaces_between_special: bool = True) -> Spelling:
        stream = self.stream(skip_special=skip_special, spaces_between_special=spaces_between_special)
        if isinstance(stream, _WindowStream):
            return _WindowSpelling(stream)
        return Spelling(self, stream, self._special if skip_special else frozenset[int]())

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, its leading space kept; empty for an id without a token."""
        if self._pieces is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._pieces.token_bytes(token_id)


class Spelling:
    """What each token of one growing text adds to it, as bytes: joined they are the text's.

    But for one space: SentencePiece's first word keeps the space before it, which the text drops. What is not UTF-8 is
    U+FFFD in the text, and itself here. A token that the text leaves out adds nothing.
    """

    def __init__(self, decoding: Decoding, stream: TextStream, skipped: frozenset[int]) -> None:
        self.num_chars = 0  # whole characters of the text so far
        self._decoding = decoding
        self._stream = stream
        self._skipped = skipped
        self._num_certain = 0

    def push(self, token_id: int) -> bytes:
        self._num_certain += len(self._stream.push(token_id))
        # Pending characters that are broken afterwards become no fewer.
        self.num_chars = max(self.num_chars, self._num_certain + len(self._stream.pending))
        return self.peek(token_id)

    def peek(self, token_id: int) -> bytes:
        """What the token would add."""
        return b"" if token_id in self._skipped else self._decoding.token_bytes(token_id)


class _WindowSpelling(Spelling):
    """Here a token has no bytes of its own: what it adds depends on those before it."""

    _stream: _WindowStream

    def __init__(self, stream: _WindowStream) -> None:
        self.num_chars = 0
        self._stream = stream

    def push(self, token_id: int) -> bytes:
        text = self._stream.push(token_id)
        self.num_chars += len(text)
        return text.encode()

    def peek(self, token_id: int) -> bytes:
        return self._stream.peek(token_id).encode()


class _ByteStream:
    pending = ""  # an unfinished character is never complete

    def __init__(self, pieces: BytePieces, skipped: frozenset[int]) -> None:
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
    def __init__(self, pieces: TextPieces, skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._strip_char, self._to_strip = pieces.strip
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
            if self._context:
                self._ids.pop()  # a token without text is no context for the next, unless the text begins with it
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

    def peek(self, token_id: int) -> str:
        """The text that a token would add."""
        return self._decode([*self._ids, token_id])[len(self._context_text) :]

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._context_text) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
