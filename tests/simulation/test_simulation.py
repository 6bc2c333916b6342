"""The simulator: the real scheduler, a clock for a device, and times that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks import workloads
from benchmarks.scale.step_costs import compared, fit_prompts, requests
from quire.cli.main import main
from quire.config.simulate import SimulateConfig
from quire.foundation.errors import ConfigError, InputError
from quire.simulation.costs import StepCosts, known_costs, load_costs
from quire.simulation.run import simulate
from quire.simulation.trace import Line, read_trace, request_of
from quire.types.request import EngineRequest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PLAIN = StepCosts(
    device="none", model="none", tensor_parallel_size=1, source="", decode_ms=[(1, 10.0), (10, 10.0)], context=0,
    context_ns=0.0, prompt_us=100.0, pair_ns=0.0, num_blocks=1001, max_model_len=4096, max_num_seqs=10,
    max_num_batched_tokens=1000,
)  # fmt: skip


def asked(*lines: Line) -> list[EngineRequest]:
    return [request_of(line, number) for number, line in enumerate(lines)]


def test_one_request_takes_its_steps() -> None:
    found = simulate(asked(Line(5, prompt_tokens=500)), PLAIN)
    assert found.first_token.p50 == pytest.approx(50, abs=0.2)  # 500 tokens of 100 µs
    assert found.seconds == pytest.approx(0.05 + 4 * 0.01, abs=0.001)
    assert found.steps == 5
    assert found.busy == [pytest.approx(1.0, abs=0.01)]


def test_more_requests_than_seats_wait_for_a_seat() -> None:
    found = simulate(asked(*(Line(20, prompt_tokens=10) for _ in range(20))), PLAIN)
    assert found.seconds == pytest.approx(2 * 20 * 0.01, rel=0.1)
    assert found.requests == 20
    assert simulate(asked(*(Line(20, prompt_tokens=10) for _ in range(20))), PLAIN, 2).seconds < 0.6 * found.seconds


def test_prefixes_are_found_where_they_are() -> None:
    lines = [Line(2, arrival=0.2 * i, prompt_tokens=810, prefix=str(i % 4), shared_tokens=800) for i in range(40)]
    near = simulate(asked(*lines), PLAIN, 4)
    spread = simulate(asked(*lines[::-1][::-1]), PLAIN, 3, "round_robin")
    assert near.cached_tokens == 36 * 800
    assert spread.cached_tokens < near.cached_tokens
    assert near.first_token.mean < spread.first_token.mean


def test_it_is_the_same_every_time() -> None:
    lines = [Line(9, arrival=0.01 * i, prompt_tokens=50 + i) for i in range(60)]
    assert simulate(asked(*lines), PLAIN) == simulate(asked(*lines), PLAIN)


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(InputError, match="does not hold"):
        simulate(asked(Line(1, prompt_tokens=5000)), PLAIN)


def test_it_foretells_what_an_h200_did() -> None:
    """T1, which the costs know nothing of."""
    results = json.loads((RESULTS / "2026-11-22-a8f2628-nvidia-h200.json").read_text())
    for name in ("h200-llama-3.1-8b", "h200-qwen3-0.6b"):
        [(_, measured, simulated, _), *_] = compared({**results, "rows": _only(results, "T1")}, load_costs(name))
        assert simulated == pytest.approx(measured, rel=0.1)


def _only(results: dict[str, list[dict[str, str]]], test: str) -> list[dict[str, str]]:
    return [row for row in results["rows"] if row["test"] == test]


def test_costs_of_prompts_are_found_again() -> None:
    times = {
        f"{n}x{length}": n * length * 0.02 + n * length**2 / 2 * 3e-7 for n, length in ((1, 1024), (1, 8192), (4, 512))
    }
    prompt_us, pair_ns = fit_prompts(times)
    assert prompt_us == pytest.approx(20.0)
    assert pair_ns == pytest.approx(0.3)
    assert len(requests(workloads.t1()[:3])) == 3


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"arrival": 1, "prompt_tokens": 100, "output_tokens": 5}\n\n{"prompt": [1, 2], "output_tokens": 3}\n'
    )
    assert main(["simulate", str(trace), "--gpus", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 2
    assert main(["simulate", str(trace)]) == 0
    assert "llama-3.1-8b on 1 × 1 NVIDIA H200" in capsys.readouterr().out
    assert len(read_trace(str(trace))) == 2
    for name in known_costs():
        assert load_costs(name).decode_ms
    mine = tmp_path / "mine.json"
    mine.write_bytes(msgspec.json.encode(PLAIN))
    assert load_costs(str(mine)) == PLAIN


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"output_tokens": 0, "prompt_tokens": 1}', "line 1 of .*output_tokens must be >= 1"),
        ('{"output_tokens": 1}', "prompt, or prompt_tokens"),
        ('{"output_tokens": 1, "prompt_tokens": 1, "shared_tokens": 2}', "shared_tokens up to as many"),
        ('{"output_tokens": 1, "tokens": 1}', "line 1 of .*unknown field"),
        ("", "has no requests"),
    ],
)
def test_lines_that_mean_nothing_are_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "trace").write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_trace(str(tmp_path / "trace"))


def test_numbers_of_gpus_must_go_together() -> None:
    assert SimulateConfig(gpus=8).num_replicas(2) == 4
    for options, message in (
        ({"gpus": 2, "replicas": 3}, "need 3 GPUs; gpus=2"),
        ({"tp": 2}, "the costs are of tp=1"),
        ({"gpus": 0}, "gpus must be >= 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            SimulateConfig(**options).num_replicas(1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="costs must be one of h200"):
        load_costs("nothing")
