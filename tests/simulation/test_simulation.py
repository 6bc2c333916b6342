"""The simulator: the real scheduler, a clock for a device, and times that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.scale import step_costs
from benchmarks.scale.compared import FIGURES, TOLERANCE, Figure, compared, table
from benchmarks.scale.step_costs import fit_prompts, simulated_prompts
from quire.cli.main import main
from quire.config.simulate import SimulateConfig
from quire.foundation.errors import ConfigError, InputError
from quire.simulation.costs import HostCosts, Sharing, StepCosts, known_costs, load_costs
from quire.simulation.run import simulate
from quire.simulation.trace import Line, read_trace, request_of
from quire.types.request import EngineRequest

PLAIN = StepCosts(
    device="none", model="none", tensor_parallel_size=1, source="", decode_ms=[(1, 10.0), (10, 10.0)], context=0,
    context_ns=0.0, prompt_us=100.0, pair_ns=0.0, num_blocks=1001, max_model_len=4096, max_num_seqs=10,
    max_num_batched_tokens=1000, overlap=64,
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


def test_what_the_host_does_is_in_the_time_of_a_burst() -> None:
    lines = [Line(5, prompt_tokens=100, stream=False) for _ in range(10)]
    host = HostCosts(request_us=1000, prompt_token_us=10, admit_us=500, eager_ms=3)
    slow = msgspec.structs.replace(PLAIN, host=host)
    without, found = (simulate(asked(*lines), costs, together=True).seconds for costs in (PLAIN, slow))
    assert found - without == pytest.approx(10 * 0.002 + 10 * 0.0005, abs=1e-6)  # launches are hidden
    short = msgspec.structs.replace(slow, decode_ms=[(1, 1.0), (10, 1.0)], prompt_us=1.0)
    assert simulate(asked(*lines), short, together=True).seconds >= 5 * 0.003  # but by steps that are shorter
    graphs = msgspec.structs.replace(short, sizes=[16], mixed_sizes=[(0, 2048)])
    assert simulate(asked(*lines), graphs, together=True).seconds < 0.04


def test_steps_take_what_the_graph_takes_that_holds_them() -> None:
    steps = [(1, 10.0), (2, 12.0), (4, 20.0), (8, 40.0)]
    costs = msgspec.structs.replace(PLAIN, decode_ms=steps, sizes=[1, 2, 4, 8], prompt_us=0.01, overlap=64)
    three, four = (
        simulate(asked(*(Line(50, prompt_tokens=10) for _ in range(n))), costs, together=True) for n in (3, 4)
    )
    assert three.seconds == pytest.approx(four.seconds)
    loose = msgspec.structs.replace(costs, sizes=[])
    assert simulate(asked(*(Line(50, prompt_tokens=10) for _ in range(3))), loose).seconds < 0.85 * three.seconds


def test_weights_are_read_once_and_experts_as_far_as_they_are_hit() -> None:
    large = msgspec.structs.replace(
        PLAIN, decode_ms=[(1, 3.0)], prompt_us=1.0, overlap=1.5, max_num_batched_tokens=9000
    )
    whole = simulate(asked(Line(1, prompt_tokens=4000)), large).seconds
    tokens = 4032  # in whole pieces of 64
    assert whole == pytest.approx((3**1.5 + (tokens / 1000) ** 1.5) ** (2 / 3) / 1e3, rel=0.01)
    sparse = msgspec.structs.replace(PLAIN, decode_ms=[(1, 1.0), (64, 8.0)], experts=(8, 1), sizes=[1, 64])
    dense = msgspec.structs.replace(sparse, experts=None)
    eight = [Line(9, prompt_tokens=1) for _ in range(8)]
    of_sparse, of_dense = (
        simulate(asked(*eight), msgspec.structs.replace(costs, sizes=[1, 8, 64]), together=True).seconds
        for costs in (sparse, dense)
    )
    assert of_sparse > 2 * of_dense  # eight rows hit five of eight experts


def test_ranks_share_what_they_can_and_meet() -> None:
    sharing = Sharing(
        sums=64, token_bytes=8192, kv_heads=8, weight_bytes=16_000, block_bytes=16,
        sum_us={2: [(8192, 10.0), (81920, 20.0)], 4: [(8192, 30.0), (81920, 40.0)]},
    )  # fmt: skip
    one = msgspec.structs.replace(PLAIN, sharing=sharing, context_ns=8.0)
    two = one.shared_by(2)
    assert two.shared_by(2) is two
    assert two.num_blocks == 2 * one.num_blocks + 1000
    assert two.context_ns == 4.0
    gap = simulate(asked(Line(101, prompt_tokens=1)), two).token_gap.p50
    assert gap == pytest.approx(5.0 + 0.64, rel=0.01)
    for ranks, us in ((3, 30.0), (4, 30.0), (8, 30.0)):  # sums of as many, of the next more, or of the most
        gap = simulate(asked(Line(101, prompt_tokens=1)), one.shared_by(ranks)).token_gap.p50
        assert gap == pytest.approx(10.0 / ranks + 64 * us / 1e3, rel=0.01)
    assert sharing.sum_of(8 * 81920, 2) == 160.0  # as much longer as it is
    partly = msgspec.structs.replace(
        one, sharing=msgspec.structs.replace(sharing, whole_us=[(1, 2000.0), (10, 11000.0)])
    )
    for rows, ms in ((1, 2 + 8 / 2), (10, 10)):  # never longer than alone
        assert dict(partly.shared_by(2).decode_ms)[rows] == pytest.approx(ms)
    with pytest.raises(ConfigError, match="tp=2: the costs are of tp=1"):
        PLAIN.shared_by(2)
    with pytest.raises(ConfigError, match="tp=4: the costs are of tp=2"):
        two.shared_by(4)


@pytest.mark.parametrize(
    ("file", "model", "tests", "count"),
    [
        ("2026-11-22-374cd16-nvidia-h200.json", "qwen3-0.6b", ("T1b", "T4"), 2),
        ("2026-11-26-a14a6972-nvidia-h200.json", "llama-3.1-8b+fp8", ("T1",), 1),
        ("2026-11-26-70d40cda-nvidia-h200-ranks.json", "llama-3.1-8b", ("T1", "T2"), 3),
        ("2026-11-26-266f1d72-nvidia-h200-ranks.json", "llama-3.1-8b", ("T1", "T2"), 3),
        ("2026-11-23-404fcca-nvidia-h200-experts.json", "qwen3-30b-a3b", ("T1",), 1),
    ],
)
def test_it_foretells_what_an_h200_did(file: str, model: str, tests: tuple[str, ...], count: int) -> None:
    """Of which the costs know nothing."""
    found = list(compared(file, [model], tests))
    assert len(found) == count
    for figure in found:
        assert abs(figure.error) <= TOLERANCE, figure


def test_copies_behind_one_server_are_foretold_as_copies() -> None:
    """Of a file that two commands wrote, one of them with four times the requests."""
    file = "2026-11-26-57bf9d44-nvidia-h200-serve.json"
    of = {figure.case: figure for figure in compared(file, ["llama-3.1-8b"], ["T5"]) if figure.metric == "output_tok_s"}
    assert of.keys() == {"rate=inf", "dp=4 rate=inf"}
    for figure in of.values():
        assert abs(figure.error) <= TOLERANCE, figure
    assert of["dp=4 rate=inf"].simulated > 3.9 * of["rate=inf"].simulated


@pytest.mark.parametrize(
    ("case", "options", "failed", "why"),
    [
        ("dp=2,rate=4", "--data-parallel-size 4", 0, "no command that is modelled"),
        ("pp=2,rate=4", "--pipeline-parallel-size 2", 0, "no command that is modelled"),
        ("rate=4", "--max-num-seqs 8", 0, "no command that is modelled"),
        ("rate=4", "", 3, "its requests failed"),
    ],
)
def test_servers_that_cannot_be_foretold_are_named(
    case: str, options: str, failed: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"seconds": 1.0, "requests_at_once": 10, "options": options}
    row = {"test": "T5", "model": "llama-3.1-8b", "case": case, "metric": "failed", "value": failed}
    assert not list(FIGURES["T5"]("a.json", "llama-3.1-8b", {"settings": settings, "rows": [row]}))
    assert capsys.readouterr().out == f"left out: a.json llama-3.1-8b T5 {case}: {why}\n"


def test_runs_whose_costs_would_be_of_another_day_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    file = "2026-11-22-e1ffaa5-two-nvidia-h200-tp2.json"  # no sums of that time
    assert not list(compared(file, ["llama-3.1-8b"], ["T1"]))
    assert (
        f"left out: {file} llama-3.1-8b T1 tp=2: what it lacks was measured on another day" in capsys.readouterr().out
    )


def test_costs_are_of_their_time() -> None:
    """Sums of ranks take less since a commit that came between these files; costs that come along have the newest."""
    before, after = "2026-11-26-5e3a1b71-nvidia-h200-ranks.json", "2026-11-26-266f1d72-nvidia-h200-ranks.json"
    found = [
        step_costs.fit(file, "llama-3.1-8b", at).sharing
        for file, at in (
            (before, step_costs.date(before)),
            (after, step_costs.date(after)),
            (before, step_costs.NEWEST),
        )
    ]
    then, later, newest = (sharing.sum_of(1 << 20, 4) for sharing in found if sharing is not None)
    assert later < 0.8 * then
    assert newest < 0.8 * then


@pytest.mark.parametrize("name", known_costs())
def test_costs_that_come_along_say_what_they_are_of(name: str) -> None:
    costs = load_costs(name)
    steps, *others = costs.source.split(", ")
    assert all(step_costs.read(other)["rows"] for other in others)
    made = step_costs.fit(steps, costs.model, step_costs.date(steps))
    assert dict(made.decode_ms) == pytest.approx(dict(costs.decode_ms))


def test_the_table_says_what_is_outside() -> None:
    figures = [Figure("a", "m", "T4", "", "seconds", 2.0, simulated) for simulated in (2.1, 2.5)]
    assert "| m | T4 | seconds | 2 | 2 | 2.3 | **+5.0% … +25.0%** |" in table(figures)
    assert "2 figures, 1 within 10%; error in the median 15.0%, at most 25.0%; held out: 2 figures, 1 within" in table(
        figures
    )


def test_costs_of_prompts_are_found_again() -> None:
    wanted = msgspec.structs.replace(
        PLAIN, prompt_us=20.0, pair_ns=0.3, num_blocks=9000, max_model_len=32768, max_num_batched_tokens=16384,
        decode_ms=[(1, 3.0)], overlap=1.5,
    )  # fmt: skip
    times = {case: simulated_prompts(wanted, case) for case in ("1x1024", "1x8192", "4x4096")}
    found = fit_prompts(msgspec.structs.replace(wanted, prompt_us=14.0, pair_ns=0.5), times)
    assert found.prompt_us == pytest.approx(20.0, rel=0.01)
    assert found.pair_ns == pytest.approx(0.3, rel=0.02)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"arrival": 1, "prompt_tokens": 100, "output_tokens": 5}\n\n{"prompt": [1, 2], "output_tokens": 3}\n'
    )
    assert main(["simulate", str(trace), "--gpus", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 2
    assert main(["simulate", str(trace)]) == 0
    assert "llama-3.1-8b on 1 × 1 NVIDIA H200" in capsys.readouterr().out
    assert main(["simulate", str(trace), "--gpus", "4", "--tp", "2", "--offline"]) == 0
    assert "llama-3.1-8b on 2 × 2 NVIDIA H200" in capsys.readouterr().out
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
        ({"gpus": 0}, "gpus must be >= 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            SimulateConfig(**options).num_replicas(1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="costs must be one of h200"):
        load_costs("nothing")
