"""Several cores behind one client: requests spread, stay near their prefixes, and outlive the core that had them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM
from quire.config.engine import EngineConfig
from quire.config.parallel.data_parallel import check_cores
from quire.engine.balance import ANSWER_TOKENS, CHUNK, Balancer
from quire.engine.client import DataParallelClient
from quire.engine.joined_answers import JOINS
from quire.engine.merged_stats import merge_stats
from quire.engine.messages import EngineInfo
from quire.engine.places import environment_of
from quire.foundation.cores import usable_cores
from quire.foundation.errors import ConfigError, EngineDeadError, InputError
from quire.frontend.async_engine import AsyncLLM
from quire.types.kv import KVGroupSpec, WorkerReport
from quire.types.output import EngineStats, QueueClass, QueueStats
from quire.types.request import BACKGROUND, EngineRequest
from quire.types.sampling import RequestOutputKind, SamplingParams
from quire.types.view import EngineView
from tests.engine.echo_worker import NAME, expected, make_request, make_resolved
from tests.engine.test_core import make_core


def start(cores: int = 2, **options: Any) -> DataParallelClient:
    return DataParallelClient.start(make_resolved(executor="uni", data_parallel_size=cores, **options), NAME)


def prompts(count: int) -> list[list[int]]:
    return [[number + 1, 2, 3] * (number % 7 + 1) for number in range(count)]


def pids(client: DataParallelClient) -> list[int]:
    return [answer["pid"] for answer in client.call("workers", "hello")]


@pytest.fixture
def pair() -> Iterator[DataParallelClient]:
    client = start(hf_overrides={"step_seconds": 0.002})
    yield client
    client.shutdown()


# -- the whole ---------------------------------------------------------------------------------------------------


def generate(llm: LLM, given: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_two_cores_answer_what_one_does_and_both_work(pair: DataParallelClient) -> None:
    with LLM.from_client(pair, None) as llm:
        assert generate(llm, prompts(40), 30) == [expected(ids, 30) for ids in prompts(40)]
        stats = msgspec.convert(pair.call("stats"), EngineStats)
        assert stats.generation_tokens == 40 * 30
        assert all(each.generation_tokens >= 10 * 30 for each in stats.engines)
        assert len(set(pids(pair))) == 2
        assert pair.call("reset_prefix_cache") is True
        pair.call("check")
        labels = Counter(metric.labels["engine"] for metric in llm.get_metrics())
        assert labels.keys() == {"0", "1"}


def test_an_offline_run_outlives_a_core(pair: DataParallelClient) -> None:
    with LLM.from_client(pair, None) as llm:
        threading.Timer(0.2, os.kill, (pids(pair)[1], signal.SIGKILL)).start()
        assert generate(llm, prompts(40), 150) == [expected(ids, 150) for ids in prompts(40)]
        while len(pids(pair)) < 2:
            assert generate(llm, prompts(1), 2)
        assert msgspec.convert(pair.call("stats"), EngineStats).num_restarts == 1
        assert generate(llm, prompts(20), 9) == [expected(ids, 9) for ids in prompts(20)]


def test_streams_outlive_a_core_and_then_all_of_them() -> None:
    async def main() -> None:
        client = await asyncio.to_thread(start, hf_overrides={"step_seconds": 0.004})
        llm = AsyncLLM(client, None)
        params = SamplingParams(
            max_tokens=100, temperature=0, detokenize=False, output_kind=RequestOutputKind.DELTA
        )  # fmt: skip

        async def stream(number: int) -> list[int]:
            found: list[int] = []
            async for output in llm.generate({"prompt_token_ids": prompts(60)[number]}, params, f"r{number}"):
                found += output.outputs[0].token_ids
            return found

        victims = [answer["pid"] for answer in await llm.collective_rpc("hello")]
        streams = [asyncio.create_task(stream(number)) for number in range(20)]
        await asyncio.sleep(0.15)
        os.kill(victims[0], signal.SIGKILL)
        while sum(each.is_up for each in llm.stats().engines) != 1:
            await asyncio.sleep(0.005)
        assert llm.outage is None  # the other one serves
        streams += [asyncio.create_task(stream(number)) for number in range(20, 40)]
        while len(await llm.collective_rpc("hello")) < 2:
            await asyncio.sleep(0.02)
        for answer in await llm.collective_rpc("hello"):
            os.kill(answer["pid"], signal.SIGKILL)
        while llm.outage is None:
            await asyncio.sleep(0.005)
        streams += [asyncio.create_task(stream(number)) for number in range(40, 60)]
        assert await asyncio.gather(*streams) == [expected(ids, 100) for ids in prompts(60)]
        assert llm.outage is None
        await llm.refresh_stats()
        assert llm.stats().num_running == llm.stats().num_waiting == 0
        llm.shutdown()

    asyncio.run(main())


def test_cores_that_died_together_leave_no_others(pair: DataParallelClient) -> None:
    """Both are found dead in one pass: nobody serves from the first death that is told."""
    for pid in pids(pair):
        os.kill(pid, signal.SIGKILL)
    for number, core in enumerate(pair._cores):
        while core.death is None:
            with contextlib.suppress(EngineDeadError):
                core.poll(1.0)
        pair._bury(number)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        pair._raise_death()
    assert pair.death is not None
    assert pair.death.others == 0


def test_one_that_does_not_come_back_leaves_the_rest_to_the_others() -> None:
    client = start(hf_overrides={"step_seconds": 0.002}, max_engine_restarts=0)
    with LLM.from_client(client, None) as llm:
        first, second = pids(client)
        threading.Timer(0.1, os.kill, (first, signal.SIGKILL)).start()
        assert generate(llm, prompts(20), 100) == [expected(ids, 100) for ids in prompts(20)]
        assert pids(client) == [second]
        os.kill(second, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            generate(llm, prompts(20), 100)


def test_cores_that_cannot_start_leave_nothing_behind() -> None:
    with pytest.raises(ConfigError, match="echo refuses"):
        start(hf_overrides={"refuse": "ConfigError"})


@pytest.mark.parametrize(
    ("device", "gpus", "options", "message"),
    [
        ("cpu", None, {"data_parallel_size": 0}, r"data_parallel_size must be >= 1, got 0"),
        ("cuda", 3, {"data_parallel_size": 2, "tensor_parallel_size": 2}, r"needs 4 GPUs of 2 each, .* may use 3"),
        ("torch:mps", None, {"data_parallel_size": 2}, r"torch:mps cannot be shared out among cores"),
    ],
)
def test_cores_that_have_no_room_are_refused(device: str, gpus: int | None, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cores(EngineConfig.from_flat(**options).runtime, device, gpus)


def test_each_core_has_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    resolved = replace(make_resolved(**options), device="cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [environment_of(resolved, core) for core in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,6,7")
    assert environment_of(resolved, 1) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert int(environment_of(make_resolved(**options), 1)["OMP_NUM_THREADS"]) == max(1, usable_cores() // 4)
    assert environment_of(make_resolved(**options, num_threads=3), 1) == {}


# -- where a request goes ----------------------------------------------------------------------------------------

GROUP = KVGroupSpec("full", 16, 1, 1, 1, 4)
REPORT = WorkerReport(
    device="echo", num_blocks=1025, max_model_len=4096, groups=[GROUP], vocab_size=997, weight_bytes=0, kv_bytes=0,
    free_bytes=0, attention_backend="", phases={},
)  # fmt: skip
INFO = EngineInfo(make_resolved(), REPORT)


def request(name: str, tokens: list[int], **fields: Any) -> EngineRequest:
    return msgspec.structs.replace(make_request(name, tokens, 8), **fields)


def report(free: int = 1024, **queue: Any) -> EngineStats:
    return EngineStats(num_blocks=1025, num_free_blocks=free, queue=QueueStats(**queue))


def test_requests_spread_by_number() -> None:
    balancer = Balancer(3, INFO)
    found = Counter(balancer.choose(request(f"r{i}", [i] * 8), range(3)) for i in range(30))
    assert found == {0: 10, 1: 10, 2: 10}


def test_a_prefix_draws_as_long_as_it_pays() -> None:
    balancer, prefix = Balancer(2, INFO), list(range(1, 2 * CHUNK * 8 + 1))
    home = balancer.choose(request("first", prefix), range(2))
    balancer.begin("first")
    num_saved = len(prefix)
    for i in range(num_saved // ANSWER_TOKENS - 2):
        name = f"r{i}"
        assert balancer.choose(request(name, [*prefix, i]), range(2)) == home
        balancer.begin(name)
    found = [balancer.choose(request(f"late{i}", [*prefix, i]), range(2)) for i in range(8)]
    assert 1 - home in found


def test_salts_and_dead_cores_share_no_prefix() -> None:
    balancer, prefix = Balancer(2, INFO), list(range(1, 257))
    home = balancer.choose(request("first", prefix), range(2))
    assert balancer.choose(request("other", prefix, cache_salt="x"), range(2)) != home
    balancer.end(["first", "other"])
    assert balancer.choose(request("again", prefix), range(2)) == home
    assert balancer.bury(home) == {"again"}
    assert balancer.core_of("again") is None
    assert {balancer.choose(request("new", prefix), [1 - home])} == {1 - home}


def test_what_others_sent_and_what_has_no_room_counts() -> None:
    balancer = Balancer(2, INFO)
    busy = [QueueClass(0, 40, 4000, 20)]
    balancer.report(0, report(classes=busy, seats_per_second=1.0))
    balancer.report(1, report())
    assert [balancer.choose(request(f"r{i}", [i] * 9), range(2)) for i in range(9)] == [1] * 9
    balancer = Balancer(2, INFO)
    balancer.report(0, report(free=2))
    balancer.report(1, report())
    assert balancer.choose(request("long", [7] * 2000), range(2)) == 1


def test_the_background_is_nobodys_load_but_its_own() -> None:
    balancer = Balancer(2, INFO)
    behind = {balancer.choose(request(f"b{i}", [i] * 8, priority=BACKGROUND), range(2)) for i in range(2)}
    assert behind == {0, 1}
    found = Counter(balancer.choose(request(f"r{i}", [9, i] * 8), range(2)) for i in range(4))
    assert found == {0: 2, 1: 2}


def test_a_named_core_has_the_request_while_it_lives(pair: DataParallelClient) -> None:
    with LLM.from_client(pair, None):
        pair.call("look", 0.0, 60.0)
        for number in range(6):
            pair.add(msgspec.structs.replace(make_request(f"r{number}", [number + 1], 3000), core=1))
        views = {view["engine"]: view for view in pair.call("look", 0.0, 60.0)}
        assert [views[core]["num_requests"] for core in (0, 1)] == [0, 6]
        os.kill(pids(pair)[1], signal.SIGKILL)
        while pair._living() == [0, 1]:
            try:
                pair.poll(0.1)
            except EngineDeadError:
                break
        pair.add(msgspec.structs.replace(make_request("late", [7], 5), core=1))
        assert pair._balancer.core_of("late") == 0
        pair.restart()


def test_each_question_has_one_answer(pair: DataParallelClient) -> None:
    with LLM.from_client(pair, None):
        pair.call("look", 0.0, 60.0)
        for core in (0, 1):
            pair.add(msgspec.structs.replace(make_request(f"r{core}", [core + 5], 6), core=core))
        ends: dict[str, int] = {}
        while len(ends) < 2:
            ends |= {output.request_id: output.engine for output in pair.poll().special if output.finish_reason}
        assert ends == {"r0": 0, "r1": 1}
        views = msgspec.convert(pair.call("look", 0.0, 60.0), list[EngineView])
        assert [view.engine for view in views] == [0, 1]
        assert all(len(view.steps) >= 6 for view in views)
        last = [max(step.ended for step in view.steps) for view in views]
        again = msgspec.convert(pair.call("look", max(last), 60.0), list[EngineView])
        assert [view.steps for view in again] == [[], []]
        for core in (0, 1):  # the core that knows it tells
            assert [event[1] for event in pair.call("life", f"r{core}")] == ["seated", "chunk", "ended"]
        assert pair.call("life", "nobody") is None
        assert pair.call("ping") == "pong"
        assert pair.call("drain") is None
        with pytest.raises(InputError, match="collective_rpc"):
            pair.call("worker", "hello")
        with pytest.raises(InputError, match="no utility 'nothing'"):
            pair.call("nothing")


def test_every_question_of_a_core_is_joined_or_refused() -> None:
    core = make_core(1)
    core.shutdown()
    assert {*core._utilities, "drain"} == {*JOINS, "worker"}


def test_a_record_of_each_core(tmp_path: Path) -> None:
    client = start(flight_record_dir=str(tmp_path))
    with LLM.from_client(client, None):
        told = client.call("record", "a test", {})
        assert sorted(told.split(", ")) == sorted(str(file) for file in tmp_path.iterdir())
        assert len(list(tmp_path.iterdir())) == 2


def test_steps_are_told_once_and_of_their_core(pair: DataParallelClient) -> None:
    """In the parts, which /metrics reads; asking for statistics in between tells no step twice."""
    with LLM.from_client(pair, None):
        for core in (0, 1):
            pair.add(msgspec.structs.replace(make_request(f"r{core}", [1, 2, 3], 20), core=core))
        told, ended = [0, 0], 0
        while sum(told) < 2 * 22:  # the last sampled token is never computed
            outputs = pair.poll(1.0)
            assert not msgspec.convert(pair.call("stats"), EngineStats).engines[0].step_tokens
            ended += sum(output.finish_reason is not None for output in outputs.special)
            if outputs.stats is not None:
                assert outputs.stats.step_tokens == []
                told = [
                    told[core] + sum(outputs.stats.engines[core].step_tokens) for core in (0, 1)
                ]  # fmt: skip
        assert (told, ended) == ([22, 22], 2)


def test_every_number_is_summed_or_said_not_to_be() -> None:
    kinds = {field.name: field.type for field in msgspec.structs.fields(EngineStats)}
    numbers = {name for name, kind in kinds.items() if kind in (int, float)}
    one = EngineStats(**dict.fromkeys(numbers, 3))
    merged = merge_stats([one, one], [])
    not_summed = {name for name in numbers if getattr(merged, name) != 6}
    assert not_summed == {"kv_usage", "last_step_time"}


def test_sums_of_several_and_their_parts() -> None:
    one = EngineStats(num_running=2, kv_usage=0.5, num_blocks=100, phase_seconds={"idle": 1.0}, is_up=False)
    two = EngineStats(num_running=3, kv_usage=0.1, num_blocks=300, phase_seconds={"idle": 2.0, "plan": 1.0})
    queues = [
        QueueStats(classes=[QueueClass(0, 1, 10, 2)], seats_per_second=1.0, as_of=5.0),
        QueueStats(classes=[QueueClass(0, 2, 20, 3), QueueClass(7, 1, 1, 0)], seats_per_second=2.0, as_of=4.0),
    ]
    merged = merge_stats([one, two], queues)
    assert (merged.num_running, merged.num_blocks, merged.is_up) == (5, 400, True)
    assert merged.kv_usage == pytest.approx(0.2)
    assert merged.phase_seconds == {"idle": 3.0, "plan": 1.0}
    assert merged.queue is not None
    assert merged.queue.classes == [QueueClass(0, 3, 30, 5), QueueClass(7, 1, 1, 0)]
    assert (merged.queue.seats_per_second, merged.queue.as_of) == (3.0, 4.0)
    assert [each.num_running for each in merged.engines] == [2, 3]
