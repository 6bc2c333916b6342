"""EngineArgs: the options of an engine as one flat object, the way scripts for other engines hold them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quire.config.engine import EngineConfig
from quire.config.options import OptionFields


@dataclass(kw_only=True)
class EngineArgs(OptionFields):
    """Every option by its flat name, with its default."""

    def create_engine_config(self) -> EngineConfig:
        """Raises ConfigError for a value that cannot be."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return EngineConfig.from_python(**values)


@dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """The same, for `AsyncLLM`."""
