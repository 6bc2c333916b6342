"""LoRA adapters in the host's memory: read when a request first names them, and let go of by use.

While steps are computed an adapter's files are read beside them, on a thread of the worker; whoever asked for it waits,
and nobody else. Where nothing is computed nobody is held up, and it is waited for.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

from quire.config.lora import LoraConfig
from quire.executor.base import Executor
from quire.foundation.errors import EngineDeadError, InputError
from quire.foundation.log import get_logger
from quire.types.adapter import Adapter
from quire.types.request import EngineRequest

_log = get_logger(__name__)
_LOOK_SECONDS = 0.05  # between two looks whether one is read: workers of their own answer when a step is done
Waiting = EngineRequest | int
"""Who asked for an adapter: a request, or a call by its number."""


class HostedAdapters:
    """Which of them the workers keep. One that is gone is read again from its folder."""

    def __init__(self, lora: LoraConfig, executor: Executor) -> None:
        self._lora, self._executor = lora, executor
        self._hosted: OrderedDict[str, Adapter] = OrderedDict()  # by key, the least recently used first
        self._pinned: set[str] = set()
        self._being_read: dict[str, tuple[Adapter, list[Waiting]]] = {}  # by key
        self._looked = 0.0  # time.monotonic() when it was last asked whether one is read

    def has(self, adapter: Adapter) -> bool:
        """Whether `load` has nothing to read."""
        return adapter.key in self._hosted or not self._lora.enable_lora

    def begin(self, adapter: Adapter, who: Waiting) -> None:
        """Have its files read beside the steps, for one who waits for that (`take_read`)."""
        if adapter.key not in self._being_read:
            self._executor.call_each("begin_adapter", adapter.key, adapter.path)
            self._being_read[adapter.key] = (adapter, [])
        self._being_read[adapter.key][1].append(who)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for one that is being read."""
        return any(waiting for _, waiting in self._being_read.values())

    @property
    def num_requests(self) -> int:
        """That wait for theirs."""
        return sum(isinstance(who, EngineRequest) for _, waiting in self._being_read.values() for who in waiting)

    def forget(self, ids: Iterable[str]) -> list[str]:
        """These requests wait no longer. Returns those that did; their adapter comes nevertheless."""
        gone, found = set(ids), []
        for _, waiting in self._being_read.values():
            mine = [who for who in waiting if isinstance(who, EngineRequest) and who.id in gone]
            found += [who.id for who in mine]
            waiting[:] = [who for who in waiting if who not in mine]
        return found

    def take_read(self, *, wait: bool) -> list[tuple[Waiting, Exception | None]]:
        """Those who need wait no longer, and why theirs cannot be had. wait: for all of them, however long."""
        now = time.monotonic()
        if not self._being_read or (not wait and now < self._looked + _LOOK_SECONDS):
            return []
        self._looked = now
        served: list[tuple[Waiting, Exception | None]] = []
        for key, (adapter, waiting) in list(self._being_read.items()):
            if not wait and not all(self._executor.call_each("is_adapter_read", key)):
                continue
            problem: Exception | None = None
            try:
                self.load(adapter)
            except EngineDeadError:
                raise
            except Exception as error:  # whatever is wrong with it is told to those who asked
                problem = error
            del self._being_read[key]
            served += [(who, problem) for who in waiting]
        return served

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
