"""Whether copies of a model can share long prompts: judged from config.json first, and from its layers once they are
built."""

from __future__ import annotations

from collections.abc import Iterable

from quire.config.model_info import ModelInfo
from quire.config.runtime import RuntimeConfig
from quire.config.transformers_models import TRANSFORMERS
from quire.foundation.errors import ConfigError
from quire.types.kv import KVGroupSpec

_OPTION = "prefill_context_parallel_size"
_CANNOT = {
    "state": "keeps a state, which is made of one token after the other",
    "none": "sees whole prompts both ways, and keeps nothing",
}


def check_contexts(runtime: RuntimeConfig, info: ModelInfo, *, pools: bool) -> None:
    """Raises ConfigError for what copies that share prompts do not do."""
    why = ""
    if pools:
        why = "is for models that generate, and this one pools"
    elif runtime.pipeline_parallel_size > 1:
        why = f"does not go with stages: pipeline_parallel_size must be 1, got {runtime.pipeline_parallel_size}"
    elif info.impl == TRANSFORMERS:
        why = "is not for a model that runs through transformers"
    if why and (copies := runtime.prefill_context_parallel_size) > 1:
        raise ConfigError(f"{_OPTION}={copies} {why}", _OPTION)


def check_layers(runtime: RuntimeConfig, info: ModelInfo, groups: Iterable[KVGroupSpec]) -> None:
    """groups: of the model's layers. Raises ConfigError for layers that are not attention over a growing cache."""
    copies = runtime.prefill_context_parallel_size
    for group in groups:
        if copies > 1 and group.kind in _CANNOT:
            raise ConfigError(f"{_OPTION}={copies}: {info.architecture} {_CANNOT[group.kind]}; it must be 1", _OPTION)
