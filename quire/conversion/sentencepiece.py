"""SentencePiece models (`tokenizer.model`) as tokenizers of the `tokenizers` library, id by id what the model says.

The file is a protobuf message; the few fields that matter are read here, by their numbers in the format's own
description (https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.foundation.errors import ConfigError

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, BPE = 1, 2


class Piece(NamedTuple):
    text: str
    score: float
    kind: int


@dataclass(slots=True)
class Model:
    """What a model file says; the defaults are the format's."""

    pieces: list[Piece] = field(default_factory=list)
    algorithm: int = _UNIGRAM
    byte_fallback: bool = False
    suffix_spaces: bool = False
    unk: int = 0
    bos: int = 1
    eos: int = 2
    pad: int = -1
    charsmap: bytes = b""
    dummy_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True

    def text(self, index: int) -> str | None:
        return self.pieces[index].text if 0 <= index < len(self.pieces) else None


def parse(data: bytes) -> Model:
    """Raises ValueError for what is no SentencePiece model."""
    model = Model()
    for number, value in _fields(data):
        if number == 1:
            model.pieces.append(_piece(_bytes(value)))
        elif number == 2:
            _read_trainer(model, _bytes(value))
        elif number == 3:
            _read_normalizer(model, _bytes(value))
    if not model.pieces:
        raise ValueError("it holds no pieces")
    return model


def build(model: Model, *, prefix_everywhere: bool) -> Tokenizer:
    """prefix_everywhere: a space is put before the text behind each special token, not only before the first text.

    Raises ConfigError for a model whose algorithm nobody here has.
    """
    if model.algorithm not in (_UNIGRAM, BPE):
        raise ConfigError(
            "its SentencePiece model is of words or characters; only BPE and Unigram can run", "tokenizer"
        )
    if model.suffix_spaces or not model.escape_spaces:
        raise ConfigError("its SentencePiece model keeps spaces behind words, or unescaped: not supported", "tokenizer")
    tokenizer = Tokenizer(_bpe(model) if model.algorithm == BPE else _unigram(model))
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_spaces:
        steps += [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.dummy_prefix and prefix_everywhere:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if model.dummy_prefix and not prefix_everywhere:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    end = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    tokenizer.add_special_tokens([AddedToken(p.text, normalized=False) for p in model.pieces if p.kind == CONTROL])
    # These are looked for in the text as the model sees it, spaces escaped.
    tokenizer.add_tokens(
        [AddedToken(p.text, normalized=SPACE in p.text) for p in model.pieces if p.kind == USER_DEFINED]
    )
    return tokenizer


def _unigram(model: Model) -> models.Unigram:
    vocabulary = [
        # What is never the result of a search scores below whatever is.
        (piece.text, piece.score if piece.kind in (NORMAL, USER_DEFINED) else min(piece.score, -1e6))
        for piece in model.pieces
    ]
    return models.Unigram(vocabulary, unk_id=model.unk, byte_fallback=model.byte_fallback)


def _bpe(model: Model) -> models.BPE:
    """Merges in the order of what they make: the pair with the best score is joined, the leftmost of equals."""
    ids = {piece.text: index for index, piece in enumerate(model.pieces)}
    merges = []
    for index, piece in enumerate(model.pieces):
        if piece.kind not in (NORMAL, USER_DEFINED):
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in ids and right in ids:
                merges.append((-piece.score, index, cut, left, right))
    merges.sort()
    return models.BPE(
        vocab=ids,
        merges=[(left, right) for *_, left, right in merges],
        unk_token=model.text(model.unk),
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


# -- protobuf's wire format ---------------------------------------------------------------------------------------


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message: an integer, or bytes (of floats too).

    https://protobuf.dev/programming-guides/encoding
    """
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if kind == 2:
            length, place = _varint(data, place)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"it has a field of the unknown kind {kind}")
        if place + length > len(data):
            raise ValueError("it ends inside a field")
        yield number, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise ValueError("it ends inside a number")
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
    raise ValueError("it has a number of more than ten bytes")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("it has a number where a message belongs")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("it has a message where a number belongs")
    return value - (1 << 64) if value >= 1 << 63 else value


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _bytes(value).decode("utf-8")
        elif number == 2:
            (score,) = struct.unpack("<f", _bytes(value))
        elif number == 3:
            kind = _int(value)
    return Piece(text, score, kind)


_TRAINER = {3: "algorithm", 24: "suffix_spaces", 35: "byte_fallback", 40: "unk", 41: "bos", 42: "eos", 43: "pad"}
_NORMALIZER = {3: "dummy_prefix", 4: "remove_extra_spaces", 5: "escape_spaces"}


def _read_trainer(model: Model, data: bytes) -> None:
    for number, value in _fields(data):
        if name := _TRAINER.get(number):
            setattr(model, name, type(getattr(model, name))(_int(value)))


def _read_normalizer(model: Model, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2:
            model.charsmap = _bytes(value)
        elif number in _NORMALIZER:
            setattr(model, _NORMALIZER[number], bool(_int(value)))
