"""LoRA adapters of a server: those that it starts with, and those that a folder has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.peft import CONFIG
from quire.config.serve import ServeConfig
from quire.foundation.errors import ConfigError, InputError
from quire.types.adapter import LoRARequest

if TYPE_CHECKING:
    from quire.frontend.async_engine import AsyncLLM


async def load_modules(engine: AsyncLLM, serve: ServeConfig) -> None:
    """Those that the server starts with. Raises ConfigError for one that cannot be used."""
    for module in serve.modules():
        number = engine.adapters.number_of(module.name)
        try:
            await engine.add_lora(LoRARequest(module.name, number, module.path, module.base_model_name))
        except InputError as error:
            raise ConfigError(f"lora_modules: {module.name}: {error.message}", "lora_modules") from None


def find_in_folder(engine: AsyncLLM, serve: ServeConfig, name: str) -> LoRARequest | None:
    """The adapter that `lora_resolver_dir` has under that name, a folder of its own; None: none, or no such option."""
    if serve.lora_resolver_dir is None or name != Path(name).name or name in ("", ".", ".."):
        return None
    folder = Path(serve.lora_resolver_dir).expanduser() / name
    if not (folder / CONFIG).is_file():
        return None
    return LoRARequest(name, engine.adapters.number_of(name), str(folder))
