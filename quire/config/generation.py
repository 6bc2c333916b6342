"""generation_config.json: end tokens, and sampling defaults, checked at the start by the rules of requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.reading import check_integers
from quire.foundation.errors import ConfigError, InputError
from quire.foundation.json_file import read_json_object, shown
from quire.types.sampling import SamplingParams

FILE = "generation_config.json"
# Keys of the file → fields of SamplingParams.
_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_generation_config(option: str, model: Path) -> tuple[dict[str, Any], str]:
    """What the file of the option `generation_config` holds ({}: nothing wanted, or the model has none), and its name.

    Raises ConfigError for a named folder without the file.
    """
    if option == "none":
        return {}, FILE
    file = (model if option == "auto" else Path(option).expanduser()) / FILE
    if option != "auto" and not file.exists():
        raise ConfigError(
            f"generation_config={option!r}: {file} does not exist; name a folder that holds it, or auto or none",
            "generation_config",
        )
    return read_json_object(file, "generation_config", {}), str(file)


def sampling_defaults(generation: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Fields of SamplingParams. Raises ConfigError naming file and key."""
    found = {}
    for key, parameter in _DEFAULTS.items():
        value = generation.get(key)
        if value is None:
            continue
        check_integers(value, key, file=name)
        try:
            SamplingParams(**{parameter: value})
        except (InputError, TypeError, ValueError, OverflowError) as error:
            text = str(error).replace(parameter, key, 1)
            raise ConfigError(
                f"{name}: {text}; correct the file, or ignore it with generation_config=none", "generation_config"
            ) from None
        found[parameter] = value
    return found


def token_ids(config: Mapping[str, Any], key: str, vocab_size: int, name: str) -> list[int]:
    """One id or a list of them; null: none. Raises ConfigError for what is no token of the vocabulary."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"{name}: {key} must be a token id or a list of them, got {shown(value)}", key)
        if not 0 <= token < vocab_size:
            raise ConfigError(f"{name}: {key} must be in [0, {vocab_size}), the vocabulary, got {token}", key)
    return ids
