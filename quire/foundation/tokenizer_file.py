"""The tokenizer of a model folder as the `tokenizers` library reads it, with the tokens that only its config names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from quire.foundation.errors import ConfigError


def read_tokenizer(folder: Path) -> Tokenizer:
    """Raises ConfigError for a folder that holds no tokenizer Quire can read."""
    tokenizer = _load(folder)
    _add_missing_tokens(tokenizer, read_json(folder / "tokenizer_config.json"))
    return tokenizer


def read_json(file: Path) -> dict[str, Any]:
    """An object; empty if there is no such file. Raises ConfigError for anything else."""
    if not file.exists():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}", "tokenizer") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a JSON object", "tokenizer")
    return data


def _load(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        if (folder / "tokenizer.model").exists():
            raise ConfigError(
                f"{folder} has only a SentencePiece tokenizer.model; Quire reads tokenizer.json. Convert it once: "
                "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
                "tokenizer",
            )
        raise ConfigError(
            f"{file} does not exist; name a folder that has one with tokenizer=…, or work on token ids "
            "with skip_tokenizer_init=True",
            "tokenizer",
        )
    try:
        raw = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for anything it cannot read
        raise ConfigError(f"{file} cannot be read: {error}", "tokenizer") from None
    raw.no_truncation()
    raw.no_padding()
    return raw


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows."""
    entries = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(entry["content"]) is None:
            flags = {k: entry[k] for k in ("lstrip", "rstrip", "normalized", "single_word") if k in entry}
            token = AddedToken(entry["content"], special=entry.get("special", False), **flags)
            add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
            add([token])
