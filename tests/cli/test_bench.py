"""`quire bench` against a server: data sets, sweeps, curves, and whether two results differ."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.bench import compare
from quire.cli.bench.workload import WorkloadConfig, make_shots, read_shots
from quire.cli.main import main
from quire.foundation.errors import ConfigError
from tests.server.conftest import Served, echo_server
from tests.server.echo_llm import EchoLLM

SHAREGPT = [
    {"conversations": [{"from": "human", "value": "How are you?"}, {"from": "gpt", "value": "x" * 40}]},
    {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Why?"}]},
    {"conversations": [{"from": "gpt", "value": "nobody asked"}]},
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with echo_server(EchoLLM(delay=0.0005, served_model_name=["echo"])) as server:
        yield server


def bench(kind: str, served: Served, *options: str, file: Path | None = None) -> dict[str, Any]:
    output = [] if file is None else ["--output-json", str(file)]
    assert main(["bench", kind, "--url", served.url, "--input-len", "8", "--output-len", "4", *options, *output]) == 0
    return {} if file is None else json.loads(file.read_text())


def test_prompts_of_a_file_are_sent_as_they_are(served: Served, tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text(json.dumps(SHAREGPT))
    before = len(served.llm.seen)
    numbers = bench(
        "serve", served, "--dataset", str(tmp_path / "set.json"), "--num-prompts", "4", "--endpoint", "chat",
        "--num-warmups", "0", file=tmp_path / "out.json",
    )  # fmt: skip
    prompts = [seen["prompt"].text for seen in served.llm.seen[before:]]
    assert sorted(prompts) == ["user: How are you?\nassistant: "] * 2 + ["user: Why?\nassistant: "] * 2
    assert numbers["total_output_tokens"] == 2 * (40 // 4) + 2 * 4  # as long as the answers of the file
    assert numbers["total_input_tokens"] == sum(map(len, prompts))  # as the server has counted


@pytest.mark.parametrize(
    "text",
    [
        '[{"messages": [{"role": "user", "content": "a"}]}]',
        '{"prompt": "a", "output_len": 4}\n{"prompt": "a", "answer": "four words are here"}\n',
    ],
)
def test_forms_of_data_sets(text: str, tmp_path: Path) -> None:
    (tmp_path / "set").write_text(text)
    shots = read_shots(str(tmp_path / "set"), WorkloadConfig(num_prompts=5, output_len=4))
    assert [(shot.text, shot.output_len) for shot in shots] == [("a", 4)] * 5


@pytest.mark.parametrize(("text", "says"), [("[", "cannot be read"), ("[]", "no prompt"), ('[{"a": 1}]', "item 0")])
def test_what_is_no_data_set(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "set").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_shots(str(tmp_path / "set"), WorkloadConfig())


def test_groups_share_beginnings() -> None:
    shots = make_shots(WorkloadConfig(num_prompts=6, input_len=4, prefix_len=8, num_prefixes=2), 1000)
    beginnings = [tuple(shot.token_ids[:8]) for shot in shots]
    assert beginnings == [beginnings[0], beginnings[1]] * 3
    assert len(set(beginnings)) == 2


def test_a_sweep_is_measured_drawn_and_compared(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        found = bench(
            "sweep", served, "--concurrencies", "1", "4", "--num-prompts", "8", "--repeats", "2",
            "--plot", str(tmp_path / "a.svg"), file=file,
        )  # fmt: skip
        assert [point["max_concurrency"] for point in found["points"]] == [1, 4]
        assert all(len(point["runs"]) == 2 and point["completed"] == 8 for point in found["points"])
    assert found["points"][1]["output_throughput"] > found["points"][0]["output_throughput"]
    assert "<svg" in (tmp_path / "a.svg").read_text()
    for name in ("two.png", "two.html"):
        assert main(["bench", "plot", "--results", *map(str, files), "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "two.html").read_text()
    assert page.count("<table>") == 2
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "https://matplotlib.org", ""
    ).replace("http://creativecommons.org", "").replace(served.url, "")
    capsys.readouterr()
    assert main(["bench", "compare", *map(str, files)]) == 0
    told = capsys.readouterr().out
    assert told.count("output_throughput") == 2
    assert "±" in told
    assert "noise unknown" not in told


def runs(*values: float) -> dict[str, Any]:
    return {"output_throughput": sum(values) / len(values), "runs": [{"output_throughput": v} for v in values]}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (runs(100.0, 102.0, 98.0), runs(101.0, 103.0, 99.0), "within noise"),
        (runs(100.0, 102.0, 98.0), runs(120.0, 121.0, 119.0), "better"),
        (runs(100.0, 102.0, 98.0), runs(80.0, 81.0, 79.0), "WORSE"),
        ({"output_throughput": 100.0}, {"output_throughput": 101.0}, "noise unknown"),
        ({"p99_ttft_ms": 5.0, "runs": [{"p99_ttft_ms": 5.0}] * 2}, {"p99_ttft_ms": 4.0}, "noise unknown"),
    ],
)
def test_a_difference_is_told_beside_its_noise(before: dict[str, Any], after: dict[str, Any], verdict: str) -> None:
    (found,) = compare.differences(before, after)
    assert found.verdict == verdict


def test_less_latency_is_better() -> None:
    one, other = ({"p50_ttft_ms": x, "runs": [{"p50_ttft_ms": x + d} for d in (-0.1, 0.1)]} for x in (9.0, 5.0))
    (found,) = compare.differences(one, other)
    assert (found.verdict, round(found.change, 3)) == ("better", -0.444)


def test_welch_agrees_with_a_textbook_case() -> None:
    """Samples of four, means 10 and 12, variances 2/3: standard error 0.57735, 6 degrees of freedom."""
    one, other = ([x - 1, x - 0.0, x, x + 1] for x in (10.0, 12.0))
    (found,) = compare.differences(runs(*one), runs(*other))
    assert found.noise == pytest.approx(2.45 * 0.57735 / 10, rel=1e-3)


@pytest.mark.parametrize(
    "command", ["bench throughput", "bench latency", "bench startup", "bench serve", "bench sweep", "profile"]
)
@pytest.mark.parametrize("file", ["no/such/folder.json", "."])
def test_numbers_that_could_not_be_kept_are_not_measured(
    command: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "quire.llm", None)  # an engine would start
    assert main([*command.split(), "--output-json", file]) == 2
    assert f"output_json '{file}'" in capsys.readouterr().err


def test_a_plot_of_no_known_kind_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sweep", "--rates", "1", "--plot", "a.gif", "--url", "http://127.0.0.1:9"]) == 2
    assert ".svg" in capsys.readouterr().err
