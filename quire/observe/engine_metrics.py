"""The names that dashboards know for what a core counts, for /metrics and `LLM.get_metrics` alike."""

from __future__ import annotations

from quire.types.metrics import Counter, Gauge, Metric
from quire.types.output import EngineStats

# Field of EngineStats → name and meaning. Prometheus adds "_total" to the names of counters.
GAUGES = {
    "num_running": ("vllm:num_requests_running", "Requests in the running batch."),
    "num_waiting": ("vllm:num_requests_waiting", "Requests waiting for a place in the batch."),
    "kv_usage": ("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1."),
    "num_seats_used": ("quire:seats_used", "Seats taken."),
    "num_free_blocks": ("quire:kv_blocks_free", "Free KV blocks."),
    "num_blocks": ("quire:kv_blocks", "KV blocks in all."),
}
COUNTERS = {
    "num_preemptions": ("vllm:num_preemptions", "Preemptions."),
    "prefix_queries": ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    "prompt_tokens": ("vllm:prompt_tokens", "Prefill tokens."),
    "cached_tokens": ("vllm:prompt_tokens_cached", "Prompt tokens whose KV was reused."),
    "generation_tokens": ("vllm:generation_tokens", "Generated tokens."),
    "num_steps": ("quire:steps", "Engine steps."),
    "num_restarts": ("quire:engine_restarts", "Engines that took the place of one that had died."),
}
DRAFT_COUNTERS = {  # of an engine that drafts
    "num_drafts": ("vllm:spec_decode_num_drafts", "Drafts verified."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified."),
    "num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were right."),
}
ACCEPTED_PER_POS = ("vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens that were right, by their place.")


def counters_of(stats: EngineStats) -> dict[str, tuple[str, str]]:
    """Those that there are."""
    return COUNTERS | DRAFT_COUNTERS if stats.num_accepted_per_pos else COUNTERS


def metrics_of(stats: EngineStats, labels: dict[str, str]) -> list[Metric]:
    gauges = [Gauge(name, labels, getattr(stats, field)) for field, (name, _) in GAUGES.items()]
    counters = [Counter(name, labels, getattr(stats, field)) for field, (name, _) in counters_of(stats).items()]
    places = [
        Counter(ACCEPTED_PER_POS[0], {**labels, "position": str(place)}, count)
        for place, count in enumerate(stats.num_accepted_per_pos)
    ]
    return [*gauges, *counters, *places]
