"""Recording what the worker does: a trace of torch's profiler, or a sign for a profiler that watches from outside."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import torch
from torch import nn

from quire.config.profiler import OPTION, ProfilerConfig
from quire.foundation.errors import ConfigError, InputError
from quire.worker.ranges import Ranges


class Profiler:
    """Begun and ended by the thread that runs the steps: only what it launches is recorded."""

    def __init__(self, config: ProfilerConfig, device: torch.device, mark: str = "") -> None:
        """mark: of this process, in the names of files.

        Raises ConfigError if there is nothing to record here, or no folder to write to.
        """
        self._config = config
        self._is_cuda = device.type == "cuda"
        self._running: torch.profiler.profile | None = None
        self._has_begun = False
        self._ranges: Ranges | None = None
        self._prefix, self._mark = "", mark
        if config.profiler == "cuda" and not self._is_cuda:
            raise ConfigError(f"{OPTION}: profiler=cuda needs a GPU; on a CPU use torch", OPTION)
        if config.profiler == "torch":
            self._folder = Path(config.torch_profiler_dir).expanduser().absolute()
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{OPTION}: torch_profiler_dir cannot be made: {error}", OPTION) from None
            if not os.access(self._folder, os.W_OK):
                raise ConfigError(f"{OPTION}: nobody may write to torch_profiler_dir {str(self._folder)!r}", OPTION)

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Around the launch of a step, which has a name of its own in the profile."""
        return contextlib.nullcontext() if self._ranges is None else self._ranges.named(f"step {number}")

    def start(self, prefix: str | None = None, model: nn.Module | None = None) -> None:
        """prefix: of the trace's file name. model: whose layers have names in it.

        Raises InputError if it has begun already, or for a prefix with a path.
        """
        prefix = prefix or "quire"
        if not isinstance(prefix, str) or prefix != Path(prefix).name or prefix in (".", ".."):
            raise InputError(f"profile_prefix must be the beginning of a file name, got {prefix!r}", "profile_prefix")
        if self._has_begun:
            raise InputError("a profile is being recorded already: stop_profile ends it")
        self._prefix = prefix
        if self._config.profiler == "cuda":
            torch.cuda.profiler.start()
        else:
            self._running = self._torch_profile()
            self._running.start()
        if model is not None:
            self._ranges = Ranges(model, nvtx=self._config.profiler == "cuda")
            self._ranges.open()
        self._has_begun = True

    def stop(self) -> str | None:
        """Path of the trace; None if another program has it. Raises InputError if nothing is being recorded."""
        if not self._has_begun:
            raise InputError("no profile is being recorded: start_profile begins one")
        self._has_begun = False
        if self._ranges is not None:
            self._ranges.close()
            self._ranges = None
        if self._is_cuda:
            torch.cuda.synchronize()  # steps run ahead of the host
        if self._running is None:
            torch.cuda.profiler.stop()
            return None
        self._running.stop()
        ending = "json.gz" if self._config.torch_profiler_use_gzip else "json"
        path = self._folder / f"{self._prefix}{self._mark}-{os.getpid()}-{time.time_ns()}.pt.trace.{ending}"
        self._running.export_chrome_trace(str(path))
        self._running = None
        return str(path)

    def _torch_profile(self) -> torch.profiler.profile:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._is_cuda:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        config = self._config
        return torch.profiler.profile(
            activities=kinds,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
            profile_memory=config.torch_profiler_with_memory,
            record_shapes=config.torch_profiler_record_shapes,
        )
