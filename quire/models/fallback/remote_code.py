"""Code that comes with a checkpoint. It is run in the worker only, after `trust_remote_code`, and said file by file."""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path
from typing import Any

from quire.config.model_info import ModelInfo
from quire.config.transformers_models import code_reference
from quire.foundation.errors import ConfigError
from quire.foundation.log import get_logger
from quire.foundation.shown import shown

_log = get_logger(__name__)


def classes(info: ModelInfo) -> tuple[Any, Any]:
    """Of the config and of the model that a checkpoint brings along. Raises ConfigError if they are not there."""
    folder, reference = Path(info.path), code_reference(info.hf_config)
    listed = info.hf_config["auto_map"].get("AutoConfig")
    if reference is None:
        raise ConfigError(f"{info.architecture} has no code in auto_map", "trust_remote_code")
    for one in (reference, listed):
        if one is not None:
            _say(folder, one)
    load = import_module("transformers.dynamic_module_utils").get_class_from_dynamic_module
    model_class = load(reference, str(folder), local_files_only=True)
    if isinstance(listed, str):
        config_class = load(listed, str(folder), local_files_only=True)
        model_class.config_class = model_class.config_class or config_class
        return config_class, model_class
    known = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    told = info.hf_config.get("model_type")
    if told not in known:
        raise ConfigError(
            f"config.json: auto_map names no AutoConfig, and transformers knows no model_type={shown(told)}", "model"
        )
    return known[told], model_class


def _say(folder: Path, reference: str) -> None:
    """Name the files that are about to be run, with hashes of what is in them."""
    module, dot, name = reference.partition(".")
    if "--" in reference or not dot or not name or not (module.isidentifier() and (folder / f"{module}.py").is_file()):
        raise ConfigError(f"config.json: auto_map names {shown(reference)}, which is no file beside it", "auto_map")
    first = folder / f"{module}.py"
    found = import_module("transformers.dynamic_module_utils").get_relative_import_files(str(first))
    for file in dict.fromkeys([first, *map(Path, found)]):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        _log.warning("trust_remote_code: running %s (sha256 %s)", file, digest[:16])
