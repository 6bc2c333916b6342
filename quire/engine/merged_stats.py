"""The statistics of several cores as those of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, zip_longest

import msgspec

from quire.types.output import EngineStats, QueueClass, QueueStats

_SUMMED = (
    "num_running", "num_waiting", "num_deferred", "num_steps", "num_blocks", "num_free_blocks", "num_seats_used",
    "prompt_tokens", "computed_tokens", "generation_tokens", "cached_tokens", "prefix_queries", "prefix_hits",
    "num_preemptions", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "operations", "read_bytes",
    "written_bytes", "floor_seconds", "num_restarts",
)  # fmt: skip


def merge_stats(each: Sequence[EngineStats], queues: Sequence[QueueStats]) -> EngineStats:
    """Sums, with the parts in `engines`, where alone the lists since the last report are. queues: of the cores that
    live, as they count for who comes now."""
    merged = EngineStats(**{name: sum(getattr(stats, name) for stats in each) for name in _SUMMED})
    merged.engines = [msgspec.structs.replace(stats, queue=None, engines=[]) for stats in each]
    merged.is_up = any(stats.is_up for stats in each)
    merged.running_adapters = sorted(set(chain.from_iterable(stats.running_adapters for stats in each)))
    merged.waiting_adapters = sorted(set(chain.from_iterable(stats.waiting_adapters for stats in each)))
    merged.kv_usage = sum(stats.kv_usage * stats.num_blocks for stats in each) / max(1, merged.num_blocks)
    merged.num_accepted_per_pos = [
        sum(counts) for counts in zip_longest(*(stats.num_accepted_per_pos for stats in each), fillvalue=0)
    ]
    merged.last_step_time = max((stats.last_step_time for stats in each), default=0.0)
    merged.queue = _merge_queues(queues)
    for stats in each:
        for phase, seconds in stats.phase_seconds.items():
            merged.phase_seconds[phase] = merged.phase_seconds.get(phase, 0.0) + seconds
    return merged


def _merge_queues(queues: Sequence[QueueStats]) -> QueueStats | None:
    if not queues:
        return None
    waiting, tokens, running = Counter[int](), Counter[int](), Counter[int]()
    for each in chain.from_iterable(queue.classes for queue in queues):
        waiting[each.priority] += each.waiting
        tokens[each.priority] += each.tokens
        running[each.priority] += each.running
    means = [queue.mean_tokens for queue in queues if queue.mean_tokens]
    return QueueStats(
        classes=[QueueClass(kind, waiting[kind], tokens[kind], running[kind]) for kind in sorted(waiting.keys())],
        prefilling=sum(queue.prefilling for queue in queues),
        free_seats=sum(queue.free_seats for queue in queues),
        seats_per_second=sum(queue.seats_per_second for queue in queues),
        tokens_per_second=sum(queue.tokens_per_second for queue in queues),
        mean_tokens=sum(means) / len(means) if means else 0.0,
        num_begun=sum(queue.num_begun for queue in queues),
        as_of=min(queue.as_of for queue in queues),
    )
