"""How ColBERT (Khattab and Zaharia, 2020) frames what it compares: a token that says what a text is, queries filled up
with masks, words of documents that do not count. As ColBERT's own artifact.metadata says it, or PyLate's config.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

from quire.config.reading import read, read_positive
from quire.config.sentence_transformers import FILE
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import read_json_object, shown

METADATA = "artifact.metadata"


@dataclass(frozen=True, kw_only=True)
class LateInteraction:
    """Of a text, (the token behind its first one, "": none; tokens at most, 0: as many as the context has)."""

    query: tuple[str, int] = ("", 0)
    document: tuple[str, int] = ("", 0)
    expands: bool = False  # queries are filled up with masks to the length above
    attends: bool = True  # which the other tokens see
    skipped: tuple[str, ...] = ()  # words of documents that do not count
    size: int = 0  # of a vector; 0: as the layers behind the model say


def read_late(folder: Path, *, is_colbert: bool) -> LateInteraction | None:
    """None for a model of another kind. Raises ConfigError for what is not known."""
    if not is_colbert:
        return None
    if (folder / METADATA).exists():
        return _of_colbert(folder / METADATA)
    file = folder / FILE
    told, name = read_json_object(file, "model", {}), str(file)
    if not told:
        return LateInteraction(size=_size(folder))
    words = told.get("skiplist_words") or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{file}: skiplist_words must be a list of strings, got {shown(words)}", "model")
    return LateInteraction(
        query=(read(str, told, "query_prefix", "", file=name), _length(told, "query_length", name)),
        document=(read(str, told, "document_prefix", "", file=name), _length(told, "document_length", name)),
        expands=read(bool, told, "do_query_expansion", True, file=name) and told.get("query_length") is not None,
        attends=read(bool, told, "attend_to_expansion_tokens", False, file=name),
        skipped=tuple(words),
    )


def _of_colbert(file: Path) -> LateInteraction:
    told, name = read_json_object(file, "model"), str(file)
    similarity = read(str, told, "similarity", "cosine", file=name)
    if similarity != "cosine":
        raise ConfigError(
            f"{file}: similarity={similarity!r} is not supported: vectors are compared by cosine", "model"
        )
    return LateInteraction(
        query=(read(str, told, "query_token_id", "[unused0]", file=name), _length(told, "query_maxlen", name, 32)),
        document=(read(str, told, "doc_token_id", "[unused1]", file=name), _length(told, "doc_maxlen", name, 220)),
        expands=True,
        attends=read(bool, told, "attend_to_mask_tokens", False, file=name),
        skipped=tuple(string.punctuation) if read(bool, told, "mask_punctuation", True, file=name) else (),
        size=read_positive(told, "dim", 128, file=name),
    )


def _length(told: dict[str, object], key: str, file: str, usual: int = 0) -> int:
    return usual if told.get(key) is None else read_positive(told, key, file=file)


def _size(folder: Path) -> int:
    config = read_json_object(folder / "config.json", "model", {})
    return read_positive(config, "colbert_dim", read_positive(config, "dim", 128))
