"""EngineConfig: every option of an engine, one section a room.

Each option is at once a keyword of `LLM(...)`, a CLI flag, a YAML key and a row of the reference: its field says it
once.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from quire.config.cache import CacheConfig
from quire.config.logits_processors import LOGITS_PROCESSORS
from quire.config.lora import LoraConfig
from quire.config.model import ModelConfig
from quire.config.replies import ReplyConfig
from quire.config.runtime import STAT_LOGGERS, ObserveConfig, RuntimeConfig
from quire.config.schedule import SchedulerConfig
from quire.config.unsupported import refusal
from quire.foundation.errors import ConfigError

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "schedule": SchedulerConfig,
    "lora": LoraConfig,
    "replies": ReplyConfig,
    "runtime": RuntimeConfig,
    "observe": ObserveConfig,
}
OPEN_TO_CLASSES = {"logits_processors": LOGITS_PROCESSORS, "stat_loggers": STAT_LOGGERS}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    replies: ReplyConfig = field(default_factory=ReplyConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    @classmethod
    def from_flat(cls, **options: Any) -> EngineConfig:
        """Build from flat names (`max_model_len=4096`).

        Raises ConfigError for an unknown name, with the nearest one.
        """
        homes = {f.name: name for name, section in SECTIONS.items() for f in dataclasses.fields(section)}
        parts: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for name, value in options.items():
            if name not in homes and (why := refusal(name)) is not None:
                raise ConfigError(why, name, code="foreign-option")
            if name not in homes:
                near = difflib.get_close_matches(name, homes, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown option {name!r}{hint}", name, code="unknown-option")
            parts[homes[name]][name] = value
        return cls(**{name: SECTIONS[name](**parts[name]) for name in SECTIONS})

    @classmethod
    def from_python(cls, **options: Any) -> EngineConfig:
        """`from_flat` for callers in this process, who may give classes where an option holds names of them."""
        for option, registry in OPEN_TO_CLASSES.items():
            if option in options:
                options[option] = [registry.name_of(one, option) for one in options[option] or ()]
        return cls.from_flat(**options)
