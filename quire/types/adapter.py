"""LoRA adapters as users name them, and as the engine does."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.foundation.errors import InputError
from quire.foundation.shown import shown


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter that a prompt is answered with.

    lora_name: what it is called. lora_int_id: of the user's own, at least 1. lora_path: a folder as the peft library
    writes it. load_inplace: take the place of an adapter of the same name that was loaded from elsewhere.
    base_model_name: for show alone. is_3d_lora_weight: ignored, since the tensors' shapes tell.

    Raises InputError.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InputError(f"lora_name must be a non-empty string, got {shown(self.lora_name)}", "lora_name")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise InputError(f"lora_int_id must be an integer >= 1, got {shown(self.lora_int_id)}", "lora_int_id")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise InputError(f"lora_path must be a folder, got {shown(self.lora_path)}", "lora_path")
        if self.tensorizer_config_dict is not None:
            raise InputError("adapters are read from safetensors files", "tensorizer_config_dict")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """One version of an adapter. key: of what its files hold; two of one key are the same, whatever they are called."""

    key: str
    name: str
    path: str

    def fields(self) -> tuple[str, str, str]:
        """For a call of the engine's."""
        return self.key, self.name, self.path
