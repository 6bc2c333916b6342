"""LLMEngine: requests step by step; the same engine under LLM."""

from __future__ import annotations

import argparse
import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.config.engine import SECTIONS
from quire.foundation.errors import ConfigError, EngineDeadError, InputError
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.llm import LLM
from quire.types.sampling import RequestOutputKind, SamplingParams
from tests.frontend.echo_engine import EchoClient, make_info
from tests.frontend.tokenizers_for_tests import byte_level, save_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_folder(tmp_path_factory.mktemp("tokenizer"), byte_level(), eos_token="<|end|>"))


@pytest.fixture
def client() -> EchoClient:
    return EchoClient(make_info())


@pytest.fixture
def engine(client: EchoClient, tokenizer: Tokenizer) -> LLMEngine:
    return LLMEngine(client, tokenizer)


def params(count: int, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, output_kind=kind, **more)


def run(engine: LLMEngine) -> dict[str, list[Any]]:
    """All outputs of each request, by its id."""
    found: dict[str, list[Any]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def test_each_step_tells_the_news(engine: LLMEngine) -> None:
    assert engine.step() == []
    assert engine.add_request("sum", "Hello", params(3)) == "sum"
    engine.add_request("delta", [1, 2], params(4, RequestOutputKind.DELTA, n=2))
    engine.add_request("end", {"prompt_token_ids": [5]}, params(5, RequestOutputKind.FINAL_ONLY))
    assert engine.get_num_unfinished_requests() == 3
    found = run(engine)
    assert [len(o.outputs[0].token_ids) for o in found["sum"]] == [1, 2, 3]
    assert [len(a.token_ids) for o in found["delta"] for a in o.outputs] == [1] * 8
    assert [len(o.outputs[0].token_ids) for o in found["end"]] == [5]
    assert [outputs[-1].finished for outputs in found.values()] == [True] * 3
    assert found["sum"][0].prompt == "Hello"
    assert engine.get_num_unfinished_requests() == 0
    assert engine.step() == []


def test_it_says_what_llm_says(engine: LLMEngine, client: EchoClient, tokenizer: Tokenizer) -> None:
    wanted = LLM.from_client(EchoClient(make_info()), tokenizer).generate("Hello", params(6, seed=3), use_tqdm=False)
    engine.add_request("0", "Hello", params(6, seed=3))
    assert run(engine)["0"][-1].outputs == wanted[0].outputs
    assert len(client.added) == 1


def test_requests_may_come_and_go_between_steps(engine: LLMEngine, client: EchoClient) -> None:
    engine.add_request("a", "x", params(10))
    engine.add_request("b", "x", params(10, n=2))
    engine.step()
    engine.abort_request(["b", "unknown"])
    assert client.aborted == ["b#0", "b#1"]
    engine.add_request("c", "x", params(2))
    found = run(engine)
    assert set(found) == {"a", "c"}
    engine.add_request("b", "x", params(1))  # its id is free again
    engine.abort_request("b")
    assert not engine.has_unfinished_requests()


def test_llm_runs_beside_the_steps(client: EchoClient, tokenizer: Tokenizer) -> None:
    llm = LLM.from_client(client, tokenizer)
    llm.llm_engine.add_request("mine", "x", params(3))
    (whole,) = llm.generate("y", params(20), use_tqdm=False)
    assert len(whole.outputs[0].token_ids) == 20
    (late,) = llm.llm_engine.step()  # nothing of it was lost meanwhile
    assert (late.request_id, len(late.outputs[0].token_ids), late.finished) == ("mine", 3, True)


@pytest.mark.parametrize(
    ("prompt", "asked", "param"),
    [("", params(1), "prompt"), ("x", {"max_tokens": 1}, "sampling_params"), ("x", quire.PoolingParams(), "model")],
)
def test_mistakes_add_nothing(engine: LLMEngine, client: EchoClient, prompt: Any, asked: Any, param: str) -> None:
    engine.add_request("good", "x", params(1))
    with pytest.raises(InputError) as caught:
        engine.add_request("bad", prompt, asked)
    assert caught.value.param == param
    with pytest.raises(InputError, match="'good' is in use"):
        engine.add_request("good", "y", params(1))
    assert list(run(engine)) == ["good"]
    assert len(client.added) == 1


def test_ctrl_c_waits_for_the_step_and_loses_nothing(engine: LLMEngine, client: EchoClient) -> None:
    engine.add_request("a", "x", params(2, RequestOutputKind.DELTA))
    poll = client.poll

    def interrupted(timeout: float | None = None) -> Any:
        signal.raise_signal(signal.SIGINT)
        return poll(timeout)

    client.poll = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    client.poll = poll  # type: ignore[method-assign]
    assert [len(o.outputs[0].token_ids) for o in run(engine)["a"]] == [1, 1]


def test_a_dead_engine_says_so(engine: LLMEngine, client: EchoClient) -> None:
    engine.add_request("a", "x", params(5))
    client.die("killed")
    with pytest.raises(EngineDeadError, match="killed"):
        engine.step()
    engine.abort_request("a")
    with pytest.raises(EngineDeadError):
        engine.add_request("b", "x", params(5))
    assert not engine.has_unfinished_requests()


# EngineArgs


def test_args_hold_every_option_with_its_default() -> None:
    assert quire.EngineArgs().create_engine_config() == quire.EngineConfig()
    assert quire.AsyncEngineArgs().create_engine_config() == quire.EngineConfig()
    names = {field.name for field in dataclasses.fields(quire.EngineArgs)}
    assert names == {field.name for section in SECTIONS.values() for field in dataclasses.fields(section)}
    assert quire.EngineOptions.__annotations__.keys() == names - {"model"}
    changed = quire.EngineArgs(model="m", max_model_len=7).create_engine_config()
    assert (changed.model.model, changed.model.max_model_len) == ("m", 7)


def test_a_scripts_own_parser_takes_every_option() -> None:
    parser = quire.EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--own", default=3)
    assert quire.EngineArgs.from_cli_args(parser.parse_args([])) == quire.EngineArgs()
    given = ["--model", "m", "--max_model_len", "7", "--no-enable-prefix-caching", "--dtype", "float32"]
    given += ["--hf-overrides", '{"a": 1}', "--cuda-graph-sizes", "1", "2", "--served-model-name", "x", "y"]
    given += ["--async-scheduling", "--gpu-memory-utilization", "0.5", "--own", "4"]
    found = quire.AsyncEngineArgs.from_cli_args(parser.parse_args(given))
    assert found == quire.AsyncEngineArgs(
        model="m",
        max_model_len=7,
        enable_prefix_caching=False,
        dtype="float32",
        hf_overrides={"a": 1},
        cuda_graph_sizes=[1, 2],
        served_model_name=["x", "y"],
        async_scheduling=True,
        gpu_memory_utilization=0.5,
    )


@pytest.mark.parametrize(
    "given", [["--dtype", "int7"], ["--hf-overrides", "[1]"], ["--seed", "x"], ["--max-model", "x"]]
)
def test_flags_that_cannot_be(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quire.EngineArgs.add_cli_args(argparse.ArgumentParser(allow_abbrev=False)).parse_args(given)
    assert given[0] in capsys.readouterr().err


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="max_model_lne"):
        quire.EngineArgs(max_model_lne=7)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        quire.LLM(max_model_lne=7)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"profiler": "torch"}, "torch_profiler_dir"),
        ({"profiler": "perf"}, "perf"),
        ({"profiler": "torch", "torch_profiler_dir": "x", "delay_iterations": 3}, "delay_iterations"),
        ({"torch_profiler_dir": "x"}, "profiler"),
        ({"profiler": "torch", "torch_profiler_dir": 3}, "torch_profiler_dir"),
    ],
)
def test_profiler_configs_that_cannot_be(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        quire.EngineArgs(profiler_config=config).create_engine_config()
    assert caught.value.field == "profiler_config"


# A real engine


def kind_of(worker: Any, *words: str, end: str) -> tuple[str, ...]:
    return type(worker).__name__, *words, end


def test_functions_run_in_the_worker_of_this_process(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    config = {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_use_gzip": False}
    args = quire.EngineArgs(max_model_len=128, use_tqdm_on_load=False, profiler_config=config)
    with LLM.from_engine_args(args) as llm:
        assert llm.collective_rpc(kind_of, args=("a",), kwargs={"end": "b"}) == [("Worker", "a", "b")]
        (parameters,) = llm.apply_model(lambda model: list(model.parameters()))  # objects, not copies
        assert parameters[0] is llm.apply_model(lambda model: next(model.parameters()))[0]
        with pytest.raises(ZeroDivisionError):
            llm.apply_model(lambda _: 1 // 0)
        assert llm.collective_rpc("memory")[0]["free"] > 0
        with pytest.raises(InputError, match="no method 'reboot'"):
            llm.collective_rpc("reboot")
        with pytest.raises(InputError, match="kwargs"):
            llm.collective_rpc("memory", kwargs={"x": 1})
        before = {metric.name: metric for metric in llm.get_metrics()}
        with pytest.raises(InputError, match="file name"):
            llm.start_profile("../escape")
        llm.start_profile("mine")
        llm.generate([[1, 2, 3]], params(4), use_tqdm=False)
        trace = Path(llm.stop_profile() or "")
        assert trace.parent == folder
        assert trace.name.startswith("mine-")
        assert '"aten::' in trace.read_text()
        after = {metric.name: metric for metric in llm.get_metrics()}
        gained = after["vllm:generation_tokens"].value - before["vllm:generation_tokens"].value  # type: ignore[attr-defined]
        assert gained == 4
        assert after["vllm:kv_cache_usage_perc"].labels == {"model_name": "quire-demo", "engine": "0"}
        assert llm.reset_prefix_cache()


@pytest.mark.parametrize("apart", [pytest.param("worker", marks=pytest.mark.long), "core"])
def test_functions_are_refused_where_the_worker_is_another_process(apart: str) -> None:
    args = quire.EngineArgs(max_model_len=128, use_tqdm_on_load=False)
    if apart == "worker":
        engine = LLM.from_engine_args(dataclasses.replace(args, distributed_executor_backend="mp")).llm_engine
    else:
        engine = LLMEngine.from_engine_args(args, enable_multiprocessing=True)
    try:
        for call in (lambda: engine.collective_rpc(kind_of), lambda: engine.apply_model(len)):
            with pytest.raises(InputError, match=r"cannot be sent to .* process: name a method") as caught:
                call()
            assert caught.value.param == "method"
        assert engine.collective_rpc("memory", timeout=30)[0]["free"] > 0
        with pytest.raises(InputError, match="profiling is off"):
            engine.start_profile()
        engine.add_request("a", [1, 2], params(3))
        assert run(engine)["a"][-1].finished
    finally:
        engine.shutdown()
