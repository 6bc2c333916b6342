"""ModelRegistry: model families of the user's own, beside those that come with Quire."""

from __future__ import annotations

from typing import Any

from quire.config import families, own_families


class ModelRegistry:
    @staticmethod
    def register_model(model_arch: str, model_cls: Any) -> None:
        """Build models whose config.json says `model_arch` with a family: "package.module", "package.module:Object",
        or the module or object itself, which must have `build(config, max_positions)` (docs/adding_a_model.md).

        Before the engine starts. An engine in a process of its own imports the family by its name. Raises ConfigError
        for what can be no family.
        """
        own_families.register(model_arch, model_cls)

    @staticmethod
    def get_supported_archs() -> list[str]:
        return sorted({*families.model_families(), *own_families.registered()})
