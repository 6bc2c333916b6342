"""Memory, power, clock and load of the NVIDIA GPUs of this machine, as their driver tells."""

from __future__ import annotations

import asyncio
import shutil
import time

import msgspec

EVERY = 2.0  # seconds; asking takes the driver some milliseconds
PATIENCE = 5.0  # seconds
_FIELDS = ("name", "memory.used", "memory.total", "power.draw", "clocks.sm", "utilization.gpu", "temperature.gpu")


class Gpu(msgspec.Struct, frozen=True):
    """None: the driver does not say."""

    name: str
    memory_used: float | None  # MiB
    memory_total: float | None  # MiB
    power: float | None  # W
    clock: float | None  # MHz
    load: float | None  # percent of the time
    temperature: float | None  # degrees Celsius


class Gpus:
    """Asked by one visitor for all."""

    def __init__(self, program: str = "nvidia-smi") -> None:
        self._program = shutil.which(program)
        self._found: list[Gpu] = []
        self._asked = 0.0
        self._lock = asyncio.Lock()

    async def look(self) -> list[Gpu]:
        """Empty where there are none."""
        if self._program is None:
            return []
        async with self._lock:
            if time.monotonic() - self._asked >= EVERY:
                self._found = await self._ask(self._program)
                self._asked = time.monotonic()
        return self._found

    async def _ask(self, program: str) -> list[Gpu]:
        query = ("--query-gpu=" + ",".join(_FIELDS), "--format=csv,noheader,nounits")
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        asked = await asyncio.create_subprocess_exec(program, *query, stdin=none, stdout=pipe, stderr=none)
        try:
            told, _ = await asyncio.wait_for(asked.communicate(), PATIENCE)
        except TimeoutError:
            asked.kill()
            return []
        return [] if asked.returncode else read(told.decode(errors="replace"))


def read(told: str) -> list[Gpu]:
    """The lines of the driver's program, one a GPU; what is no such line is passed over."""
    found = []
    for line in told.splitlines():
        name, *values = [part.strip() for part in line.split(",")]
        if len(values) == len(_FIELDS) - 1:
            found.append(Gpu(name, *map(_number, values)))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None
