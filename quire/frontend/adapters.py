"""LoRA adapters by name: what users ask for, read as far as the engine's workers need not be asked."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import msgspec

from quire.config.peft import CONFIG, PARAM, WEIGHTS, PeftConfig
from quire.config.resolve import locate_adapter
from quire.engine.client import EngineInfo
from quire.foundation.errors import ConfigError, InputError
from quire.types.adapter import Adapter, LoRARequest

_PIECE = 1 << 20


def read_adapter(request: LoRARequest, info: EngineInfo) -> Adapter:
    """The adapter as the engine knows it. Its files are read through, so it is best done aside.

    Raises:
        InputError: it cannot be used, or the engine takes none.
    """
    if not isinstance(request, LoRARequest):
        raise InputError(f"lora_request must be a LoRARequest, got {type(request).__name__}", "lora_request")
    lora = info.resolved.config.lora
    if not lora.enable_lora:
        raise InputError("the engine takes no LoRA adapters: start it with enable_lora", "lora_request")
    try:
        folder = locate_adapter(request.lora_path, info.resolved.config.model)
        PeftConfig.read(folder, lora.max_lora_rank)
        digest = hashlib.blake2b(digest_size=16)
        for name in (CONFIG, WEIGHTS):
            with (folder / name).open("rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
    except ConfigError as error:
        raise InputError(str(error), PARAM) from None
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}", PARAM) from None
    return Adapter(digest.hexdigest(), request.lora_name, str(folder.resolve()))


class AdapterNames:
    """The adapters that this front end knows, by the names that users gave them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[LoRARequest, Adapter]] = {}
        self._kept: dict[str, int] = {}  # ids of those that are yet to come

    def find(self, request: LoRARequest) -> Adapter | None:
        """The one that was loaded so before; None: it has to be read.

        Raises:
            InputError: the name is another adapter's.
        """
        known = self._known.get(request.lora_name)
        if known is None or request.load_inplace:
            return None
        if known[0].lora_path != request.lora_path or known[0].lora_int_id != request.lora_int_id:
            raise InputError(
                f"the adapter {request.lora_name!r} is loaded from {known[0].lora_path!r} with id "
                f"{known[0].lora_int_id}: load_inplace=True lets another take its place",
                "lora_name",
            )
        return known[1]

    def add(self, request: LoRARequest, adapter: Adapter) -> Adapter | None:
        """It may be named from now on. Returns the one whose place it took, if nobody else has that any more."""
        before = self.remove(request.lora_name)
        self._kept.pop(request.lora_name, None)
        self._known[request.lora_name] = (msgspec.structs.replace(request, load_inplace=False), adapter)
        return None if before is None or before.key == adapter.key else before

    def remove(self, name: str) -> Adapter | None:
        """Returns the adapter, None: it is unknown, or there under another name as well."""
        known = self._known.pop(name, None)
        if known is None or any(other.key == known[1].key for _, other in self._known.values()):
            return None
        return known[1]

    def named(self, name: str) -> tuple[LoRARequest, Adapter] | None:
        return self._known.get(name)

    def numbered(self, number: int) -> LoRARequest | None:
        """By the user's own id."""
        return next((request for request in self if request.lora_int_id == number), None)

    def number_of(self, name: str) -> int:
        """The id of an adapter; of an unknown one an id that is nobody's and is kept for it: several may be on their
        way at a time."""
        if (known := self._known.get(name)) is not None:
            return known[0].lora_int_id
        used = {request.lora_int_id for request in self} | set(self._kept.values())
        return self._kept.setdefault(name, next(number for number in itertools.count(1) if number not in used))

    def __iter__(self) -> Iterator[LoRARequest]:
        return iter([request for request, _ in self._known.values()])
