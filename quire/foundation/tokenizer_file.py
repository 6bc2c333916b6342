"""The tokenizer of a model folder as the `tokenizers` library reads it, with the tokens that only its config names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from quire.foundation.errors import ConfigError
from quire.foundation.json_file import FETCH_POINTER, is_lfs_pointer, read_json_object, shown
from quire.foundation.tokenizer_frames import add_frame

_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def read_tokenizer(folder: Path) -> Tokenizer:
    """Raises ConfigError for a folder that holds no tokenizer Quire can read."""
    tokenizer = _load(folder)
    file = folder / "tokenizer_config.json"
    config = read_json(file)
    _add_missing_tokens(tokenizer, config, str(file))
    add_frame(tokenizer, config, read_json(folder / "config.json").get("model_type"))
    return tokenizer


def read_json(file: Path) -> dict[str, Any]:
    """An object; empty if there is no such file. Raises ConfigError for anything else."""
    return read_json_object(file, "tokenizer", {})


def _load(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ConfigError(
            f"{file} does not exist, nor any other vocabulary that Quire knows (tokenizer.model, tekken.json, "
            "vocab.json, vocab.txt, *.tiktoken): name a folder that has one with tokenizer=…, or work on token ids "
            "with skip_tokenizer_init=True",
            "tokenizer",
        )
    try:
        with file.open("rb") as stream:
            is_pointer = is_lfs_pointer(stream.read(64))
        raw = None if is_pointer else Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for anything it cannot read
        raise ConfigError(f"{file} cannot be read: {error}", "tokenizer") from None
    if raw is None:
        raise ConfigError(f"{file} {FETCH_POINTER}", "tokenizer")
    raw.no_truncation()
    raw.no_padding()
    return raw


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], file: str) -> None:
    """Tokens that only tokenizer_config.json knows."""
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, Mapping) or not all(key.isascii() and key.isdigit() for key in entries):
        raise ConfigError(f"{file}: added_tokens_decoder must be an object with token ids as keys", "tokenizer")
    for key, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        content, flags = _added_token(entry, f"{file}: added_tokens_decoder[{key}]")
        if tokenizer.token_to_id(content) is None:
            token = AddedToken(content, **flags)
            add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
            add([token])


def _added_token(entry: Any, place: str) -> tuple[str, dict[str, bool]]:
    """Its text and its flags."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
        raise ConfigError(f"{place} must be an object with content, a string; got {shown(entry)}", "tokenizer")
    flags = {"special": False, **{flag: entry[flag] for flag in _FLAGS if entry.get(flag) is not None}}
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{place}: {flag} must be true or false, got {shown(value)}", "tokenizer")
    return entry["content"], flags
