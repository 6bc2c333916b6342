"""`quire simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.config.options import AboveZero, Options, Positive
from quire.foundation.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(Options):
    trace: str = ""
    """File with a request a line: {"arrival", "prompt_tokens" or "prompt", "output_tokens", "prefix",
    "shared_tokens"}."""
    costs: str = "h200-llama-3.1-8b"
    """What steps cost: the name of measured ones, or a file of your own (python -m benchmarks.scale.step_costs writes
    one)."""
    gpus: Positive = 1
    """GPUs in all."""
    tp: Positive | None = None
    """GPUs of a replica; None: what the costs were measured with. Others than one are reckoned from one's costs, and
    from what sums over ranks were measured to take."""
    replicas: Positive | None = None
    """Copies of the model; None: as many as the GPUs hold."""
    policy: Literal["prefix", "round_robin"] = "prefix"
    """How requests are spread over replicas."""
    speed: AboveZero = 1.0
    """The trace's clock: 2 lets its requests come twice as fast."""
    max_num_seqs: Positive | None = None
    """Most requests that run at once in a replica; None: as measured."""
    max_num_batched_tokens: Positive | None = None
    """Tokens of a step; None: as measured."""
    kv_cache_blocks: Positive | None = None
    """Blocks of a replica's KV cache; None: as measured."""
    offline: bool = False
    """As `LLM.generate`: nobody reads along, and nothing begins before all requests are handed over."""
    json: bool = False
    """Print JSON."""

    def num_replicas(self, ranks: int) -> int:
        """ranks: of a replica. Raises ConfigError for numbers that do not go together."""
        replicas = self.gpus // ranks if self.replicas is None else self.replicas
        if not replicas or replicas * ranks > self.gpus:
            raise ConfigError(
                f"replicas={replicas} of tp={ranks} need {max(1, replicas) * ranks} GPUs; gpus={self.gpus}", "gpus"
            )
        return replicas
