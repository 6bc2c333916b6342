"""Models of families that Quire does not have, which run through Hugging Face transformers in the worker.

Here in the brain only config.json and a list of names are read, both as text: neither transformers nor a line of a
checkpoint's own code is imported. What transformers makes of the file is the worker's business (`models/fallback`).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quire.config.families import Family, family_of
from quire.config.files.wrappers import is_wrapper, lift
from quire.config.reading import read_count, read_positive
from quire.config.rope import check_rope, context_length
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown

TRANSFORMERS = "transformers"  # the value of model_impl, and of ModelInfo.impl
_NATIVE = ("quire", "vllm")  # scripts for another engine call an engine's own families by its name
_INSTALL = "`pip install 'quire[transformers]'`"
_LIST = Path("models/auto/modeling_auto.py")  # of transformers: which class is a causal language model
# What files call the number of positions, the usual name first.
_POSITIONS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length",
    "max_seq_length", "seq_len",
)  # fmt: skip
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_PARTS = ("text_config", "vision_config", "audio_config", "speech_config", "encoder", "decoder")


def _find_family(config: Mapping[str, Any], architecture: str) -> None:
    """Raises ConfigError if no family has the model, nor its text part."""
    if is_wrapper(architecture):
        lift(config, architecture)
    else:
        family_of(architecture)


def implementation(config: Mapping[str, Any], architecture: str, wanted: str, *, trusted: bool) -> str:
    """ "" for a family of Quire's, or `TRANSFORMERS`.

    Args:
        config: config.json, overrides applied.
        wanted: the option model_impl.
        trusted: the option trust_remote_code.

    Raises ConfigError if neither will do, naming what would.
    """
    if wanted in _NATIVE:
        _find_family(config, architecture)
        return ""
    if wanted == "auto":
        try:
            _find_family(config, architecture)
            return ""
        except ConfigError as error:
            if not causal_models() and not has_code(config):
                hint = "" if _folder() else f"; with {_INSTALL} classes that transformers knows run too"
                raise ConfigError(f"{error}{hint}", "model", code="architecture") from None
            if architecture not in causal_models() and not has_code(config):
                raise
    if not _folder():
        raise ConfigError(
            f"{architecture} would run through transformers, which needs {_INSTALL}",
            "model_impl",
            code="missing-package",
        )
    if architecture not in causal_models():
        _check_code(config, architecture, trusted)
    return TRANSFORMERS


def has_code(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint brings the code of a causal language model."""
    return code_reference(config) is not None


def code_reference(config: Mapping[str, Any]) -> str | None:
    """ "file.Class" of a checkpoint's own causal language model; None if it brings none."""
    listed = config.get("auto_map")
    found = listed.get("AutoModelForCausalLM") if isinstance(listed, Mapping) else None
    return found if isinstance(found, str) else None


def runs_code(config: Mapping[str, Any], architecture: str) -> bool:
    """Whether a model that runs through transformers is made of the checkpoint's code: of a class that transformers has
    itself, its own code is taken."""
    return architecture not in causal_models() and has_code(config)


def _check_code(config: Mapping[str, Any], architecture: str, trusted: bool) -> None:
    reference = code_reference(config)
    if reference is None:
        raise ConfigError(
            f"transformers has no causal language model called {architecture}", "model", code="architecture"
        )
    if "--" in reference:
        raise ConfigError(
            f"config.json: auto_map names code of another repository, {shown(reference)}, which is not run: copy it "
            "beside the weights",
            "trust_remote_code",
        )
    if not trusted:
        raise ConfigError(
            f"{architecture} is code that comes with the checkpoint (auto_map: {shown(reference)}), and code of a "
            "checkpoint is not run unless trust_remote_code is on: read it first",
            "trust_remote_code",
        )


@cache
def causal_models() -> frozenset[str]:
    """The classes that the installed transformers lists as causal language models; none if it is not installed."""
    folder = _folder()
    try:
        text = (folder / _LIST).read_text(encoding="utf-8") if folder else ""
    except OSError:
        return frozenset()
    found = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\b.*?^\)", text, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'\(\s*"[^"]+",\s*"([^"]+)"', found[0] if found else ""))


@cache
def _folder() -> Path | None:
    """Where transformers is installed."""
    spec = importlib.util.find_spec("transformers")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


# -- what the brain must know of such a model -------------------------------------------------------------------


def fallback_config(given: Mapping[str, Any], architecture: str, name: str) -> tuple[Family, dict[str, Any]]:
    """The family that stands for all such models, and config.json with the numbers that every model has, by the names
    that Quire's families use. name: of the file, for errors.

    Raises ConfigError naming what is missing, or what no model of this kind may have.
    """
    for part in _PARTS:
        if given.get(part) is not None:
            raise ConfigError(
                f"{name}: {architecture} has parts of its own ({part}), and only text models of one part run through "
                "transformers",
                part,
            )
    if given.get("is_encoder_decoder"):
        raise ConfigError(
            f"{name}: {architecture} is an encoder with a decoder, which does not run here", "is_encoder_decoder"
        )
    if given.get("quantization_config"):
        raise ConfigError(
            f"{name}: quantized checkpoints do not run through transformers here (quantization_config)",
            "quantization_config",
        )
    values = dict(given)
    values["vocab_size"] = read_positive(given, "vocab_size", file=name)
    values["max_position_embeddings"] = _positions(given, architecture, name)
    hidden = next((key for key in _HIDDEN if given.get(key) is not None), "hidden_size")
    values["hidden_size"] = read_count(given, hidden, 0, file=name)
    return Family(name=TRANSFORMERS, architectures=(architecture,)), values


def _positions(given: Mapping[str, Any], architecture: str, name: str) -> int:
    key = next((key for key in _POSITIONS if given.get(key) is not None), None)
    if key is None:
        raise ConfigError(
            f"{name} does not say how many positions {architecture} has: hf_overrides="
            '{"max_position_embeddings": N} says it',
            "max_position_embeddings",
        )
    longest = read_positive(given, key, file=name)
    rope = given.get("rope_parameters") or given.get("rope_scaling")
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return longest
    return context_length(check_rope({"rope_theta": given.get("rope_theta"), **rope}, longest), longest)
