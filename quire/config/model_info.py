"""What the brain must know of a model, read from its folder as plain JSON (no torch, no remote code)."""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.own_families import family_name
from quire.foundation.errors import ConfigError

_MAX_HEADER = 100_000_000  # bytes of a safetensors header
# Families whose first token has the position after that of padding, which has its token's id.
_PADDED_POSITIONS = ("roberta", "xlm-roberta", "camembert")


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts of the model folder that scheduling, the front end and the worker share."""

    path: str  # local folder
    architecture: str  # e.g. "Qwen3ForCausalLM"
    hf_config: dict[str, Any]  # config.json, overrides applied; the text part of multimodal configs stays nested
    vocab_size: int
    max_position: int  # context the model was made for, rope scaling included
    eos_token_ids: list[int]  # config.json and generation_config.json together, the first is the main one
    bos_token_id: int | None
    dtype: str  # of the checkpoint: bfloat16 | float16 | float32
    hidden_size: int = 0  # of an embedding; 0: config.json does not say it
    generation_defaults: dict[str, Any] = field(default_factory=dict)  # sampling defaults of generation_config.json
    family: str = ""  # name of the user's own family that builds it; "": one of those that come with Quire


def read_model_info(path: Path, overrides: dict[str, Any], generation_config: str = "auto") -> ModelInfo:
    """Read `path`/config.json and generation_config.json.

    Raises ConfigError if a file is missing, is not JSON or lacks what every decoder needs.
    """
    config = {**_read_json(path / "config.json"), **overrides}
    text = {**config, **config.get("text_config", {})}
    architectures = config.get("architectures") or []
    if not architectures:
        raise ConfigError(f"{path}/config.json has no 'architectures': Quire cannot tell what model this is", "model")
    missing = [key for key in ("vocab_size",) if not isinstance(text.get(key), int)]
    if missing:
        raise ConfigError(f"{path}/config.json lacks {', '.join(missing)}", "model")
    generation: dict[str, Any] = {}
    if generation_config != "none":
        folder = path if generation_config == "auto" else Path(generation_config)
        if (folder / "generation_config.json").exists():
            generation = _read_json(folder / "generation_config.json")
    eos = _as_list(generation.get("eos_token_id")) + _as_list(text.get("eos_token_id"))
    return ModelInfo(
        path=str(path),
        architecture=architectures[0],
        hf_config=config,
        vocab_size=text["vocab_size"],
        max_position=_max_position(text),
        eos_token_ids=list(dict.fromkeys(eos)),
        bos_token_id=text.get("bos_token_id"),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or _dtype_on_disk(path)).removeprefix("torch."),
        hidden_size=size if isinstance(size := text.get("hidden_size"), int) else 0,
        generation_defaults=_sampling_defaults(generation),
        family=family_name(architectures[0]),
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist: is this a model folder?", "model") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}", "model") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a JSON object", "model")
    return data


def _dtype_on_disk(path: Path) -> str:
    """Of the weights, for configs that do not say it (older ones); bfloat16 if there are none to look at."""
    for file in sorted(path.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                (size,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(size, _MAX_HEADER)))
            found = Counter(entry["dtype"] for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, struct.error, TypeError, KeyError, AttributeError):
            break  # whoever loads it says what is wrong with it
        known = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        return next((known[name] for name, _ in found.most_common() if name in known), "bfloat16")
    return "bfloat16"


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _max_position(text: dict[str, Any]) -> int:
    longest = int(text.get("max_position_embeddings") or 2048)
    if text.get("model_type") in _PADDED_POSITIONS:
        longest -= int(text.get("pad_token_id") or 0) + 1
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "yarn" and scaling.get("original_max_position_embeddings"):
        longest = max(longest, int(scaling["original_max_position_embeddings"] * scaling.get("factor", 1)))
    return longest


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    found = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("max_new_tokens") is not None:
        found["max_tokens"] = generation["max_new_tokens"]
    return found
