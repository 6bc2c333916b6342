"""`profiler_config`: what is recorded between start_profile and stop_profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from quire.foundation.errors import ConfigError

OPTION = "profiler_config"


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of the JSON object, by the names that other engines have for them."""

    profiler: Literal["torch", "cuda"]  # cuda: only tells an outer profiler (nsys) when to begin and to end
    torch_profiler_dir: str = ""
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_use_gzip: bool = True

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ProfilerConfig | None:
        """None if nothing is to be recorded. Raises ConfigError naming the key."""
        if not given:
            return None
        unknown = [key for key in given if key not in cls.__struct_fields__]
        if unknown:
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"{OPTION} has the unknown key {unknown[0]!r}; it may hold {known}", OPTION)
        try:
            found = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{OPTION}: {error}", OPTION) from None
        if found.profiler == "torch" and not found.torch_profiler_dir:
            raise ConfigError(f"{OPTION}: torch_profiler_dir must name the folder for traces", OPTION)
        return found
