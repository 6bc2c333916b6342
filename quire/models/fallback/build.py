"""Models of transformers, built from a config and served on our cache: what `--model-impl transformers` means."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from quire.config.hf_config import HARMLESS
from quire.config.model_info import ModelInfo
from quire.config.rope import ROPE_KEYS
from quire.foundation.errors import ConfigError, QuireError
from quire.foundation.log import get_logger
from quire.models.fallback import remote_code
from quire.models.fallback.attention import LOOKING, register
from quire.models.fallback.model import TransformersModel

_log = get_logger(__name__)


def build_fallback(info: ModelInfo, dtype: torch.dtype, device: torch.device, max_positions: int) -> TransformersModel:
    """The model with its parameters allocated on `device`, their values not set.

    Raises ConfigError for a class that cannot be served, and for a config that it cannot be made from.
    """
    try:
        transformers = import_module("transformers")
        register()
        config_class, model_class = _classes(info, transformers)
        config = _config(info, config_class)
        if unknown := _unknown_keys(info, config_class, model_class):
            _log.warning("config.json: %s mean nothing to transformers' %s", ", ".join(unknown), info.architecture)
        _check_rope(config, info.architecture, max_positions)
        with import_module("transformers.initialization").no_init_weights():
            causal = model_class._from_config(config, dtype=dtype, attn_implementation=LOOKING)
        causal.tie_weights()
        _keep_wide(causal, dtype)
        _rope_is_fixed(causal)
        model = TransformersModel(causal.to(device).requires_grad_(False).eval(), max_positions, info.vocab_size)
    except (QuireError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise ConfigError(f"{info.architecture} runs through transformers, and {error}", "model_impl") from error
    except Exception as error:  # of other people's code
        raise ConfigError(
            f"transformers cannot build {info.architecture} from this config.json: {type(error).__name__}: {error}",
            "model",
        ) from error
    _log.info(
        "%s runs through transformers %s, not a family of Quire's: what is not recognized in it is not fused, so steps "
        "may take longer, and ranks, quantization and pooling are not for it",
        info.architecture,
        transformers.__version__,
    )
    return model.eval()


def _classes(info: ModelInfo, transformers: Any) -> tuple[Any, Any]:
    """Of the config and of the model."""
    if info.runs_code:
        return remote_code.classes(info)
    model_class = getattr(transformers, info.architecture, None)
    if model_class is None:
        raise ConfigError(f"transformers {transformers.__version__} has no {info.architecture}", "model")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ConfigError(
            f"{info.architecture} has attention of its own, not transformers' attention interface: it cannot run over "
            "a paged cache",
            "model_impl",
        )
    told = info.hf_config.get("model_type")
    known = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    config_class = known[told] if told in known else model_class.config_class  # noqa: SIM401 (lazy)
    if not issubclass(config_class, model_class.config_class):
        raise ConfigError(f"config.json: model_type={told!r} does not go with {info.architecture}", "model_type")
    return config_class, model_class


def _config(info: ModelInfo, config_class: Any) -> Any:
    given = {key: value for key, value in info.hf_config.items() if key != "auto_map"}
    config = config_class.from_dict(given)
    for key, value in {
        "use_cache": False, "return_dict": True, "output_attentions": False, "output_hidden_states": False,
        "output_router_logits": False,
    }.items():  # fmt: skip
        if hasattr(config, key):
            with suppress(AttributeError, ValueError):
                setattr(config, key, value)
    return config


def _unknown_keys(info: ModelInfo, config_class: Any, model_class: Any) -> list[str]:
    """Keys of config.json that are no field of the config's class, and no word of its code or the model's."""
    fields = {*getattr(config_class, "__dataclass_fields__", ()), *getattr(config_class, "attribute_map", ())}
    left = [key for key in info.hf_config if key not in fields | HARMLESS | {*ROPE_KEYS}]
    code = ""
    for one in (config_class, model_class):
        with suppress(OSError, TypeError):
            code += inspect.getsource(sys.modules[one.__module__])
    return sorted(key for key in left if not re.search(rf"\b{re.escape(key)}\b", code))


def _check_rope(config: Any, architecture: str, max_positions: int) -> None:
    """Two kinds of rotary settings go by the length of what is computed together, which is many rows here. Below the
    length that was trained nothing depends on it."""
    for rope in _sections(getattr(config, "rope_parameters", None)):
        kind = rope.get("rope_type", "default")
        trained = int(
            rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None) or 0
        )
        if kind in ("dynamic", "longrope") and max_positions > trained:
            raise ConfigError(
                f"config.json: rope_type={kind} beyond {trained} positions depends on the length of a text, and "
                f"{architecture} runs through transformers, where rows are computed together: set "
                f"max_model_len={trained}",
                "rope_parameters",
            )


def _sections(rope: Any) -> list[Mapping[str, Any]]:
    if not isinstance(rope, Mapping):
        return []
    return [rope, *(one for one in rope.values() if isinstance(one, Mapping))]


def _rope_is_fixed(causal: Any) -> None:
    """Within the trained length nobody has to look for a longer text in each step, and wait for the answer."""
    for module in causal.modules():
        kind = getattr(module, "rope_type", None)
        if kind in ("dynamic", "longrope"):
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {
                layer: "default" if one in ("dynamic", "longrope") else one for layer, one in kind.items()
            }


def _keep_wide(causal: Any, dtype: torch.dtype) -> None:
    """Parameters that the class wants in float32, as transformers has them after loading."""
    wide = set(causal._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        wide |= set(causal._keep_in_fp32_modules or ())
    if not wide:
        return
    found = re.compile("|".join(rf"(?:^|\.){re.escape(one)}(?:\.|$)" for one in wide))
    for name, parameter in causal.named_parameters():
        if found.search(name):
            parameter.data = parameter.data.float()
