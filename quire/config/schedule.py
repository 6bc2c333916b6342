"""How requests share the steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.config.options import NotNegative, Options, Positive, Seconds
from quire.config.speculative import SpeculativeConfig


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Options):
    max_num_seqs: Positive | None = None
    """Most requests in one step (seats). None: 1024 on a GPU with 70 GiB or more, else 256; 64 on a CPU."""
    max_num_batched_tokens: Positive | None = None
    """Most tokens in one step. None: 16384 on a GPU with 70 GiB or more, 32768 of a mixture of experts
    with 120 GiB, there up to twice as many where ranks share a step (tensor_parallel_size) and its rows then have no
    more than 2^27 numbers, but 8192 to serve; else, and in stages (pipeline_parallel_size), 4096; 2048 on a CPU; as
    many times as there are copies (prefill_context_parallel_size)."""
    max_prefill_chunk: NotNegative = 0
    """Most prompt tokens one request may bring to one step; 0: no limit but the token budget."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests; priority: lower value first, then arrival."""
    max_num_queued_reqs: Positive | None = None
    """Most waiting requests; one more is refused (HTTP 503). None: no limit offline, 4096 under `quire serve`."""
    max_queue_seconds: Seconds | None = None
    """Longest wait, as predicted, with which a request is still taken; one that would wait longer is refused (HTTP 503,
    with the time to come again). While an overload lasts the queue is kept shorter. 0: no limit. None: no limit
    offline, 30 under `quire serve`."""
    async_scheduling: bool | None = None
    """Plan the next step while the device runs this one (two plans in flight). None: on, except on a CPU in-process."""
    stream_interval: Positive = 1
    """Tokens a streamed chunk."""
    speculative_config: dict[str, Any] = field(default_factory=dict)
    """JSON object; tokens are drafted ahead and verified several a step, where that pays. method: ngram;
    num_speculative_tokens: most drafts a step; prompt_lookup_max, prompt_lookup_min: tokens that are looked for in the
    request's own text (5); policy: auto, or always. Answers are the same with and without."""
    preempt_every_step: bool = False
    """Test mode: preempt one running request at every step."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        super().__post_init__()
        SpeculativeConfig.read(self.speculative_config)
