"""Devices, processes, graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.config.options import NotNegative, Options, Positive
from quire.config.profiler import ProfilerConfig
from quire.foundation.errors import ConfigError
from quire.foundation.registry import Registry

EXECUTORS = Registry(
    "executor",
    {
        "uni": "quire.executor.in_process:InProcessExecutor",
        "mp": "quire.executor.multiproc:MultiprocExecutor",
        "ray": "quire.executor.ray:RayExecutor",
        "external": "quire.executor.external:ExternalExecutor",
    },
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
    tensor_parallel_size: Positive = 1
    """Ranks that share every layer of the model: as many GPUs, or processes on a CPU."""
    pipeline_parallel_size: Positive = 1
    """Stages, one behind the other, that the model's layers are dealt to: each is tensor_parallel_size ranks."""
    pipeline_parallel_layers: list[int] = field(default_factory=list)
    """Layers of each stage. None given: so that all have as much to do, logits counted among the last one's."""
    prefill_context_parallel_size: Positive = 1
    """Copies of the model, each tensor_parallel_size ranks, that share long prompts: each computes a part of a step's
    tokens and keeps the KV of all."""
    enable_expert_parallel: bool = False
    """Ranks share the experts of a mixture one by one, each holding whole ones, instead of a part of every expert."""
    enable_eplb: bool = False
    """Move experts between ranks, so that each has as much to do; needs enable_expert_parallel."""
    eplb_config: dict[str, Any] = field(default_factory=dict)
    """JSON object. step_interval: steps between two moves, 3000; num_redundant_experts: copies of those of a layer's
    experts that have the most to do, on further ranks, 0."""
    data_parallel_size: Positive = 1
    """Engine cores behind one server, each with a copy of the model on devices of its own (tensor_parallel_size of
    them) and its share of the requests."""
    distributed_executor_backend: str = "auto"
    """uni: the worker shares the engine's process; mp: a process of its own, one a rank; ray: an actor of a Ray cluster
    a rank; external: ranks that somebody else starts, on any machine, with `quire worker`; or what an installed package
    adds. auto: uni for one rank, mp for more."""
    attention_backend: str = "auto"
    """Attention implementation by name: triton, triton_mla, torch_cpu, sdpa, flashinfer, flash_attn; auto: the first in
    the platform's order that supports the model."""
    enforce_eager: bool = False
    """Launch every kernel from Python instead of replaying captured CUDA graphs."""
    cuda_graph_sizes: list[int] = field(default_factory=list)
    """Batch sizes to capture. None given: 1, 2, 4, 8 and on in growing steps up to max_num_seqs (at most 512)."""
    num_threads: Positive | None = None
    """CPU threads of the worker; None: the physical cores this process may use, one for a very small model."""
    max_engine_restarts: NotNegative = 5
    """An engine that dies in a process of its own is started again, and its requests go on; but not after so many times
    in a row in which nobody got a token. 0: never."""
    debug: bool = False
    """Check the scheduler's seats and blocks after every step (slow)."""

    @property
    def num_ranks(self) -> int:
        """Workers that one model takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

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
    kv_cache_metrics: bool = False
    """Measure how long KV blocks live, and lie idle before somebody needs the room."""
    kv_cache_metrics_sample: float = 0.01
    """Share of the blocks that are measured, 0 … 1."""
    enable_mfu_metrics: bool = False
    """Count the operations and bytes that steps ask of the device, as estimated from the model's shape, and the least
    time that these would take."""
    enable_log_requests: bool = False
    """Log every request (ids and lengths, never text)."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged."""
    flight_record_dir: str | None = None
    """Folder for the record of its last steps that an engine leaves when it dies, and that SIGUSR1 asks of a server.
    None: quire/records in the user's cache folder."""
    profiler_config: dict[str, Any] = field(default_factory=dict)
    """JSON object; lets profiles be recorded. profiler: torch or cuda; torch_profiler_dir: folder for the traces."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        super().__post_init__()
        for name in self.stat_loggers:
            STAT_LOGGERS.check(name, "stat_loggers")
        if not 0 < self.kv_cache_metrics_sample <= 1:
            raise ConfigError(
                f"kv_cache_metrics_sample must be in (0, 1], got {self.kv_cache_metrics_sample}",
                "kv_cache_metrics_sample",
            )
        ProfilerConfig.read(self.profiler_config)
