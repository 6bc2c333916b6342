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
# Prompt tokens a copy from which on a step is shared: with fewer, meeting in every layer takes longer than the products
# that are saved. On a CPU a token takes so long that few are enough.
_LEAST, _LEAST_ON_CPU = 512, 16
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


def least_tokens(copies: int, *, on_cpu: bool) -> int:
    """Prompt tokens of the smallest step that copies share."""
    return copies * (_LEAST_ON_CPU if on_cpu else _LEAST)


def check_steps(runtime: RuntimeConfig, max_tokens: int, max_chunk: int, *, on_cpu: bool) -> None:
    """max_tokens: of a step; max_chunk: of a prompt's part in one, 0: any. Raises ConfigError if that is too few for a
    long prompt to be shared."""
    copies = runtime.prefill_context_parallel_size
    least = least_tokens(copies, on_cpu=on_cpu)
    for option, most in (("max_num_batched_tokens", max_tokens), ("max_prefill_chunk", max_chunk or max_tokens)):
        if copies > 1 and most < least:
            raise ConfigError(
                f"{_OPTION}={copies} shares steps of {least} prompt tokens and more: {option} must be >= {least}, got "
                f"{most}",
                option,
            )


def check_layers(runtime: RuntimeConfig, info: ModelInfo, groups: Iterable[KVGroupSpec]) -> None:
    """groups: of the model's layers. Raises ConfigError for layers that are not attention over a growing cache."""
    copies = runtime.prefill_context_parallel_size
    for group in groups:
        if copies > 1 and group.kind in _CANNOT:
            raise ConfigError(f"{_OPTION}={copies}: {info.architecture} {_CANNOT[group.kind]}; it must be 1", _OPTION)
