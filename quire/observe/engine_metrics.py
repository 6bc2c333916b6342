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
    "is_up": ("vllm:engine_healthy", "1 while the engine runs, 0 while another is to take its place."),
}
COUNTERS = {
    "num_preemptions": ("vllm:num_preemptions", "Preemptions."),
    "prefix_queries": ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    "prompt_tokens": ("vllm:prompt_tokens", "Prefill tokens."),
    "cached_tokens": ("vllm:prompt_tokens_cached", "Prompt tokens whose KV was reused."),
    "computed_tokens": ("quire:prompt_tokens_computed", "Tokens of prompts computed, anew after preemptions as well."),
    "generation_tokens": ("vllm:generation_tokens", "Generated tokens."),
    "num_steps": ("quire:steps", "Engine steps."),
    "num_restarts": ("quire:engine_restarts", "Engines that took the place of one that had died."),
}
DRAFT_COUNTERS = {  # of an engine that drafts
    "num_drafts": ("vllm:spec_decode_num_drafts", "Drafts verified."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified."),
    "num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were right."),
}
WORK_COUNTERS = {  # where they are asked for
    "operations": ("vllm:estimated_flops_per_gpu", "Operations of a device, estimated."),
    "read_bytes": ("vllm:estimated_read_bytes_per_gpu", "Bytes that a device read, estimated."),
    "written_bytes": ("vllm:estimated_write_bytes_per_gpu", "Bytes that a device wrote, estimated."),
}
FLOOR_COUNTERS = {  # of devices that are known
    "floor_seconds": ("quire:step_floor_seconds", "Least time that the device needs for its steps, by its ceilings."),
}
ACCEPTED_PER_POS = ("vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens that were right, by their place.")


def counters_of(stats: EngineStats) -> dict[str, tuple[str, str]]:
    """Those that there are."""
    drafts = DRAFT_COUNTERS if stats.num_accepted_per_pos else {}
    work = WORK_COUNTERS if stats.operations else {}
    return COUNTERS | drafts | work | (FLOOR_COUNTERS if stats.floor_seconds else {})


def engines_of(stats: EngineStats) -> list[tuple[str, EngineStats]]:
    """The statistics of each engine core, with its label."""
    return [(str(number), each) for number, each in enumerate(stats.engines or [stats])]


def metrics_of(stats: EngineStats, labels: dict[str, str]) -> list[Metric]:
    """Those of each core. labels: that all have besides."""
    return [metric for number, each in engines_of(stats) for metric in _of_one(each, {**labels, "engine": number})]


def _of_one(stats: EngineStats, labels: dict[str, str]) -> list[Metric]:
    gauges = [Gauge(name, labels, getattr(stats, field)) for field, (name, _) in GAUGES.items()]
    counters = [Counter(name, labels, getattr(stats, field)) for field, (name, _) in counters_of(stats).items()]
    places = [
        Counter(ACCEPTED_PER_POS[0], {**labels, "position": str(place)}, count)
        for place, count in enumerate(stats.num_accepted_per_pos)
    ]
    return [*gauges, *counters, *places]
