"""What the two sides of a conversion tell each other."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["sentencepiece", "tiktoken", "tekken", "mistral", "transformers", "gguf"]
VERSION = 1
"""Of the conversions: what an earlier one made is made again."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Turn the files of a folder into tokenizer.json."""

    folder: str
    kind: Kind
    file: str  # the vocabulary, by its name


class Made(msgspec.Struct, frozen=True, array_like=True):
    """Files by name; or an error for the user, and nothing."""

    files: dict[str, str] = {}
    notes: list[str] = []  # for the log
    error: str = ""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Of a tensor in its file."""

    dtype: str  # torch's name of it
    shape: list[int]
    start: int


class Listing(msgspec.Struct, frozen=True, array_like=True):
    """Tensors of a file by name; or why it cannot be read."""

    tensors: dict[str, Place] = {}
    error: str = ""
