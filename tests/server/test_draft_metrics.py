"""What /metrics says of drafts: nothing where nobody drafts, else by the names that dashboards know."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from quire.server.metrics import Metrics
from quire.server.processes.shared_counters import SharedCounters
from quire.types.output import EngineStats
from tests.server.test_overload import INFO


def samples(stats: EngineStats) -> dict[tuple[str, str | None], float]:
    text = Metrics("m", INFO, SharedCounters()).render(stats).decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name, s.labels.get("position")): s.value for s in found if "spec_decode" in s.name}


def test_drafts_are_counted_only_where_there_are_any() -> None:
    assert samples(EngineStats(generation_tokens=7)) == {}
    stats = EngineStats(num_drafts=5, num_draft_tokens=15, num_accepted_tokens=6, num_accepted_per_pos=[4, 2, 0])
    assert samples(stats) == {
        ("vllm:spec_decode_num_drafts_total", None): 5,
        ("vllm:spec_decode_num_draft_tokens_total", None): 15,
        ("vllm:spec_decode_num_accepted_tokens_total", None): 6,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): 4,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 2,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"): 0,
    }
