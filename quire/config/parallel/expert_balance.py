"""When experts move between ranks, and how many of them there are twice."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.runtime import RuntimeConfig
from quire.foundation.errors import ConfigError

_OPTION = "eplb_config"


@dataclass(frozen=True, slots=True)
class ExpertBalance:
    """step_interval: steps after which experts move, if that makes ranks' loads more even; 0: never.
    num_redundant_experts: copies of a layer's experts, besides the one that each has."""

    step_interval: int = 0
    num_redundant_experts: int = 0

    @classmethod
    def read(cls, runtime: RuntimeConfig) -> ExpertBalance:
        """Raises ConfigError for what cannot be."""
        given = dict(runtime.eplb_config)
        if not runtime.enable_eplb:
            if given:
                raise ConfigError(f"{_OPTION} says how experts move: set enable_eplb", _OPTION)
            return cls()
        if not runtime.enable_expert_parallel or runtime.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_eplb moves experts between ranks: set enable_expert_parallel and tensor_parallel_size above 1",
                "enable_eplb",
            )
        made = cls(_count(given, "step_interval", 3000, 1), _count(given, "num_redundant_experts", 0, 0))
        if given:
            raise ConfigError(
                f"{_OPTION} has no {', '.join(sorted(given))}: it has step_interval and num_redundant_experts; what "
                "came to experts is counted over the interval",
                _OPTION,
            )
        return made


def _count(given: dict[str, object], key: str, default: int, least: int) -> int:
    value = given.pop(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{_OPTION}: {key} must be an integer >= {least}, got {value!r}", _OPTION)
    return value
