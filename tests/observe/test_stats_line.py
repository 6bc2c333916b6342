from __future__ import annotations

import time

from quire.observe.profiling import PhaseClock
from quire.observe.stats_line import StatsLine
from quire.types.output import EngineStats


def report(tokens: int, **more: float) -> EngineStats:
    return EngineStats(prompt_tokens=10 * tokens, generation_tokens=tokens, **more)


def test_rates_are_those_of_the_window() -> None:
    line = StatsLine(every=10)
    assert line.take(report(0), now=100.0) is None
    for second in range(1, 10):
        assert line.take(report(second), now=100.0 + second) is None
    text = line.take(report(50, num_running=3, prefix_queries=100, prefix_hits=25, kv_usage=0.5), now=110.0)
    rates = "prompt 50.0 tokens/s, generation 5.0 tokens/s"
    assert text == f"{rates}, running 3, waiting 0, KV cache 50.0%, prefix hits 25.0%"
    assert line.take(report(60), now=111.0) is None


def test_a_pause_starts_a_new_window() -> None:
    line = StatsLine(every=10)
    line.take(report(0), now=100.0)
    assert line.take(report(1000), now=5000.0) is None
    line.take(report(1050), now=5005.0)
    assert "generation 10.0 tokens/s" in (line.take(report(1100), now=5010.0) or "")


def test_phases_add_up_to_the_time_that_passed() -> None:
    began = time.perf_counter()
    clock = PhaseClock()
    for phase in ("a", "b", "a"):
        time.sleep(0.01)
        clock.lap(phase)
    assert 0.03 <= sum(clock.seconds.values()) <= time.perf_counter() - began
    assert clock.seconds["a"] >= 0.02


def test_drafts_are_told_where_there_are_any() -> None:
    line = StatsLine(every=10)
    line.take(report(0, num_draft_tokens=100, num_accepted_tokens=100), now=100.0)
    line.take(report(0, num_draft_tokens=100, num_accepted_tokens=100), now=105.0)
    text = line.take(report(1, num_draft_tokens=300, num_accepted_tokens=150), now=110.0) or ""
    assert text.endswith("drafts accepted 25.0% of 20.0 tokens/s")
    assert "drafts" not in (line.take(report(2, num_draft_tokens=300, num_accepted_tokens=150), now=120.0) or "")
