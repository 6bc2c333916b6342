"""LoRA adapters in the host's memory: read when a request first names them, and let go of by use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.config.lora import LoraConfig
from quire.executor.base import Executor
from quire.foundation.errors import InputError
from quire.foundation.log import get_logger
from quire.types.adapter import Adapter

_log = get_logger(__name__)


class HostedAdapters:
    """Which of them the workers keep. One that is gone is read again from its folder."""

    def __init__(self, lora: LoraConfig, executor: Executor) -> None:
        self._lora, self._executor = lora, executor
        self._hosted: OrderedDict[str, Adapter] = OrderedDict()  # by key, the least recently used first
        self._pinned: set[str] = set()

    def load(self, adapter: Adapter) -> None:
        """Have it on the host.

        Raises:
            ConfigError: it does not fit the model.
            InputError: the engine takes no adapters.
        """
        if not self._lora.enable_lora:
            raise InputError("the engine takes no LoRA adapters: start it with enable_lora", "lora_request")
        if adapter.key not in self._hosted:
            self._make_room(self._lora.num_kept - 1)
            self._executor.call_each("load_adapter", adapter.key, adapter.path)
            _log.info("adapter %s is loaded from %s", adapter.name, adapter.path)
            self._hosted[adapter.key] = adapter
        self._hosted.move_to_end(adapter.key)

    def load_all(self, adapters: Iterable[Adapter]) -> list[tuple[Adapter, Exception]]:
        """Those that a step needs, all at once. Returns the ones that cannot be had, and why."""
        failed: list[tuple[Adapter, Exception]] = []
        for adapter in adapters:
            try:
                self.load(adapter)
            except (InputError, ValueError) as error:
                failed.append((adapter, error))
        return failed

    def _make_room(self, most: int) -> None:
        for key in [key for key in self._hosted if key not in self._pinned]:
            if len(self._hosted) <= most:
                return
            self.drop(key)

    def drop(self, key: str) -> None:
        """Unknown keys are ignored. Who runs with it goes on."""
        if self._hosted.pop(key, None) is not None:
            self._pinned.discard(key)
            self._executor.call_each("drop_adapter", key)

    def pin(self, key: str) -> bool:
        """Keep it whatever comes. Returns whether it is there.

        Raises:
            InputError: nothing would be left for others.
        """
        if key not in self._hosted:
            return False
        if len(self._pinned | {key}) >= max(2, self._lora.num_kept):
            raise InputError(f"of max_cpu_loras = {self._lora.num_kept} adapters one must stay unpinned", "lora_id")
        self._pinned.add(key)
        return True
