"""Devices, processes, graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.config.options import Options
from quire.config.profiler import ProfilerConfig
from quire.foundation.registry import Registry

EXECUTORS = Registry(
    "executor",
    {"uni": "quire.executor.in_process:InProcessExecutor", "mp": "quire.executor.multiproc:MultiprocExecutor"},
    contract="quire.executor.base:Executor",
    needs=("sentinels", "start", "submit", "mask", "call", "call_each", "ping", "shutdown"),
    is_class=True,
)
STAT_LOGGERS = Registry(
    "stat logger",
    {"log": "quire.observe.stats_line:LogLine"},
    contract="quire:StatLogger",
    needs=("record", "close", "interval"),
    is_class=True,
    takes_paths=True,
)


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(Options):
    device: str = "auto"
    """Where the model runs: cuda, cpu, or torch:TYPE, any device of torch, without kernels of ours (torch:mps,
    torch:xpu, torch:cuda for AMD's GPUs); auto: an NVIDIA GPU, else another accelerator, else the CPU."""
    tensor_parallel_size: int = 1
    """Ranks that share every layer of the model: as many GPUs, or processes on a CPU."""
    distributed_executor_backend: str = "auto"
    """uni: the worker shares the engine's process; mp: a process of its own, one a rank; or what an installed package
    adds. auto: uni for one rank."""
    attention_backend: str = "auto"
    """Attention implementation by name: triton, triton_mla, torch_cpu, sdpa, flashinfer, flash_attn; auto: the first in
    the platform's order that supports the model."""
    enforce_eager: bool = False
    """Launch every kernel from Python instead of replaying captured CUDA graphs."""
    cuda_graph_sizes: list[int] = field(default_factory=list)
    """Batch sizes to capture. None given: 1, 2, 4, 8 and on in growing steps up to max_num_seqs (at most 512)."""
    num_threads: int | None = None
    """CPU threads of the worker; None: the physical cores this process may use, one for a very small model."""
    max_engine_restarts: int = 5
    """An engine that dies in a process of its own is started again, and its requests go on; but not after so many times
    in a row in which nobody got a token. 0: never."""
    debug: bool = False
    """Check the scheduler's seats and blocks after every step (slow)."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        super().__post_init__()
        if self.distributed_executor_backend != "auto":
            EXECUTORS.check(self.distributed_executor_backend, "distributed_executor_backend")


@dataclass(frozen=True, kw_only=True)
class ObserveConfig(Options):
    disable_log_stats: bool = False
    """No periodic statistics line."""
    stat_loggers: list[str] = field(default_factory=list)
    """Who is told the engine's statistics besides: classes of your own as package.module:Class, or names that installed
    packages gave them."""
    enable_log_requests: bool = False
    """Log every request (ids and lengths, never text)."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged."""
    profiler_config: dict[str, Any] = field(default_factory=dict)
    """JSON object; lets profiles be recorded. profiler: torch or cuda; torch_profiler_dir: folder for the traces."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        super().__post_init__()
        for name in self.stat_loggers:
            STAT_LOGGERS.check(name, "stat_loggers")
        ProfilerConfig.read(self.profiler_config)
