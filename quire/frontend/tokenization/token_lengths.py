"""How many characters one token can stand for: what proves a text too long without encoding it."""

from __future__ import annotations

import json
from math import ceil
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

_COMPOSED = 4  # characters that NFC and NFKC make one of, at most
_KEEP_ALL = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")  # steps that cut a text and drop nothing of it
_NUM_BYTES = 256


def most_characters(raw: RawTokenizer) -> int | None:
    """The most characters of a text that one token stands for, and none is dropped; None if that cannot be told.

    So a text of n characters has at least n / most_characters tokens. It cannot be told where white space or control
    characters vanish, or where any number of unknown characters becomes one token.
    """
    vocab = raw.get_vocab()
    if not _spells_everything(raw, vocab) or not _keeps_all(_state(raw.pre_tokenizer)):
        return None
    if any(token.lstrip or token.rstrip for token in raw.get_added_tokens_decoder().values()):
        return None  # they swallow the white space beside them
    shrinks = _shrinks(_state(raw.normalizer))
    return None if shrinks is None else shrinks * max(map(len, vocab), default=1)


def _spells_everything(raw: RawTokenizer, vocab: dict[str, int]) -> bool:
    """Whether every character becomes a token or a part of one, and unknown ones are not fused."""
    model = raw.model
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(_NUM_BYTES)):
        return True
    if _has_bytes(_state(raw.pre_tokenizer)):
        return all(character in vocab for character in _byte_alphabet())
    return model.unk_token is not None and not model.fuse_unk


def _byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return list(ByteLevel.alphabet())


def _state(part: Any) -> dict[str, Any] | None:
    """A step of the pipeline as tokenizer.json writes it."""
    if part is None:
        return None
    found: dict[str, Any] | None = json.loads(part.__getstate__())
    return found


def _has_bytes(state: dict[str, Any] | None) -> bool:
    if state is None:
        return False
    return state["type"] == "ByteLevel" or any(map(_has_bytes, state.get("pretokenizers", ())))


def _keeps_all(state: dict[str, Any] | None) -> bool:
    """Of a pre-tokenizer."""
    if state is None or state["type"] in _KEEP_ALL:
        return True
    if state["type"] == "Sequence":
        return all(map(_keeps_all, state["pretokenizers"]))
    return state["type"] in ("Split", "Punctuation") and state["behavior"] != "Removed"


def _shrinks(state: dict[str, Any] | None) -> int | None:
    """How many characters a normalizer makes one of, at most; None: any number."""
    match state:
        case None | {"type": "NFD" | "NFKD" | "Lowercase" | "Prepend"}:
            return 1
        case {"type": "NFC" | "NFKC"}:
            return _COMPOSED
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if content:
            return max(1, ceil(len(pattern) / len(content)))
        case {"type": "Sequence", "normalizers": steps}:
            product = 1
            for step in steps:
                factor = _shrinks(step)
                if factor is None:
                    return None
                product *= factor
            return product
    return None
