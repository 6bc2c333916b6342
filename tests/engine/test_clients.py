"""Both clients, whole: processes, sockets, deaths."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from quire.engine.client import EngineClient, InProcessClient, ProcessClient
from quire.engine.messages import Add
from quire.foundation.errors import ConfigError, EngineDeadError, InputError, QuireError
from quire.foundation.wire import Encoder, WireError
from quire.types.output import INVALID_REQUEST, EngineOutput, EngineOutputs
from tests.effort import sampled
from tests.engine.echo_worker import NAME, expected, make_request, make_resolved
from tests.server.process import PATIENCE

KINDS = [("in process", "uni"), ("in process", "mp"), ("process", "uni"), ("process", "mp")]


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch) -> Iterator[None]:
    """No test may leave a process, a zombie or a socket folder."""
    sockets = Path(tempfile.mkdtemp(dir="/tmp", prefix="qt-"))
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert left == []
    assert list(sockets.iterdir()) == []
    sockets.rmdir()


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}, {kind[1]}")
def client(request) -> Iterator[EngineClient]:
    made = make_client(*request.param)
    yield made
    made.shutdown()


def make_client(where: str, executor: str, **options: Any) -> EngineClient:
    resolved = make_resolved(executor=executor, **options)
    return ProcessClient(resolved, NAME) if where == "process" else InProcessClient(resolved, NAME)


def generate(client: EngineClient, count: int = 12) -> dict[str, list[int]]:
    prompts = {f"r{i}": [i + 1, 2, 3] * (i + 1) for i in range(count)}
    for request_id, prompt in prompts.items():
        client.add(make_request(request_id, prompt, 10))
    tokens: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    unfinished = set(prompts)
    while unfinished:
        for output in client.poll(10).each():
            if output.request_id in unfinished:
                tokens[output.request_id] += output.token_ids
                if output.finish_reason:
                    unfinished.remove(output.request_id)
    return tokens


def test_all_of_them_give_the_same_tokens(client: EngineClient) -> None:
    assert generate(client) == {f"r{i}": expected([i + 1, 2, 3] * (i + 1), 10) for i in range(12)}
    assert client.info.max_model_len == 256
    assert client.info.report.device == "echo"
    assert client.poll(0.01) == EngineOutputs()


def test_utilities_answer_through_every_client(client: EngineClient) -> None:
    assert client.call("ping") == "pong"
    answer = client.call("worker", "hello", [1, 2], "three")
    assert answer["args"] == [[1, 2], "three"]
    with pytest.raises(QuireError, match="ValueError: boom was called"):
        client.call("worker", "boom")
    with pytest.raises(InputError, match="no utility 'nothing'"):
        client.call("nothing")
    assert client.call("ping") == "pong"  # errors of utilities harm nobody


def test_an_abort_storm_leaves_nothing(client: EngineClient) -> None:
    rng = random.Random(1)
    alive: set[str] = set()
    gone: set[str] = set()
    for i in range(300):
        client.add(make_request(f"r{i}", [i + 1] * rng.randrange(1, 60), 60))
        alive.add(f"r{i}")
        if i % 3 == 0:
            victims = rng.sample(sorted(alive), rng.randrange(len(alive) + 1))
            client.abort([*victims, "unknown"])
            alive.difference_update(victims)
            gone.update(victims)
        for output in client.poll(0).each():
            assert output.request_id not in gone
            if output.finish_reason:
                alive.discard(output.request_id)
    client.abort(sorted(alive))
    client.call("check")
    stats = client.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_seats_used) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert client.poll(0.05).each() == []
    assert generate(client) == {f"r{i}": expected([i + 1, 2, 3] * (i + 1), 10) for i in range(12)}


def test_an_aborted_id_can_be_used_again_at_once(client: EngineClient) -> None:
    for _ in range(20):
        client.add(make_request("same", [9, 9, 9], 100))
        client.poll(0)
        client.abort(["same"])
    client.add(make_request("same", [5], 4))
    tokens: list[int] = []
    while len(tokens) < 4:
        tokens += [t for o in client.poll(5).each() for t in o.token_ids]
    assert tokens == expected([5], 4)


def test_many_threads_may_add_abort_and_call_while_one_polls(client: EngineClient) -> None:
    errors: list[BaseException] = []

    def busy(name: int) -> None:
        try:
            for i in range(20):
                client.add(make_request(f"{name}-{i}", [name + 1, i + 1], 5))
                if i % 5 == 0:
                    assert client.call("ping") == "pong"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=busy, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    finished: set[str] = set()
    while len(finished) < 80:
        finished.update(o.request_id for o in client.poll(10).each() if o.finish_reason)
        assert not errors
    for thread in threads:
        thread.join()


def test_asyncio_reads_the_same_outputs(client: EngineClient) -> None:
    async def main() -> list[int]:
        tokens: list[int] = []
        outputs = client.outputs()
        client.add(make_request("a", [1, 2, 3], 20))
        async for news in outputs:
            for output in news.each():
                tokens += output.token_ids
                if output.finish_reason:
                    pong, stats = await asyncio.gather(client.call_async("ping"), client.call_async("stats"))
                    assert pong == "pong"
                    assert stats["generation_tokens"] == 20
                    await outputs.aclose()
                    return tokens
        return tokens

    assert asyncio.run(main()) == expected([1, 2, 3], 20)
    assert client.call("ping") == "pong"  # the loop gave the reading back


@pytest.mark.parametrize("kind", KINDS[2:], ids=str)
def test_a_request_of_wrong_types_ends_alone(kind: tuple[str, str]) -> None:
    client = make_client(*kind)
    wrong = {
        "bad": ["one", "two"],
        "wide": np.array([1, 2]),
        "table": np.zeros((2, 2), np.int32),
        "floats": np.array([1.5]),
    }
    for name, ids in wrong.items():
        client.add(msgspec.structs.replace(make_request(name, [1], 5), token_ids=ids))
    client.add(make_request("good", [1], 3))
    outputs = []
    while not any(o.request_id == "good" and o.finish_reason for o in outputs):
        outputs += client.poll(5).each()
    refusals = {o.request_id: (o.finish_reason, o.stop_reason) for o in outputs if o.request_id in wrong}
    assert refusals == dict.fromkeys(wrong, ("error", INVALID_REQUEST))
    with pytest.raises(WireError, match="cannot be sent"):
        client.add(msgspec.structs.replace(make_request("worse", [1], 5), token_ids=[object()]))
    assert client.call("ping") == "pong"
    client.shutdown()


def test_garbage_on_the_wire_is_dropped() -> None:
    client = make_client("process", "uni")
    rng = random.Random(3)
    frame = Encoder().encode(Add(make_request("x", [1, 2, 3], 5)))[0]
    for _ in range(300):
        damaged = bytearray(frame)
        for _ in range(rng.randrange(1, 5)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        client._child.channel._out.send_multipart(  # type: ignore[attr-defined]
            rng.choice([[damaged], [rng.randbytes(rng.randrange(60))], [b""], [damaged, b"more"]])
        )
    client.abort(["x"])
    assert client.call("ping") == "pong"
    assert generate(client)["r0"] == expected([1, 2, 3], 10)
    client.shutdown()


@pytest.mark.parametrize(
    ("kind", "refusal"),
    sampled(
        list(itertools.product(KINDS, ["ConfigError", "DoesNotFitError", "InputError"])),
        lambda case: case[1] == "DoesNotFitError" or case[0] == KINDS[-1],
    ),
    ids=str,
)
def test_a_worker_that_refuses_to_start_is_heard_word_for_word(kind: tuple[str, str], refusal: str) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        make_client(*kind, hf_overrides={"refuse": refusal})
    assert type(caught.value).__name__ == refusal
    assert str(caught.value) == f"echo refuses\nto start ({refusal})"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_failed_step_is_told_and_ends_the_engine(kind: tuple[str, str]) -> None:
    client = make_client(*kind, hf_overrides={"fail_at_step": 5})
    client.add(make_request("a", [1], 50))
    outputs: list[EngineOutput] = []
    with pytest.raises(EngineDeadError, match="step 5 failed: RuntimeError: echo was told to fail"):
        read_for(client, PATIENCE, outputs)
    assert not any(output.finish_reason for output in outputs)
    assert client.death is not None
    assert (client.death.ids, client.death.was_killed) == ({"a"}, False)
    with pytest.raises(EngineDeadError):
        client.add(make_request("b", [1], 1))
    with pytest.raises(EngineDeadError):
        client.call("ping")
    client.shutdown()


def read_for(client: EngineClient, seconds: float, outputs: list[EngineOutput]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        outputs += client.poll(seconds).each()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
@pytest.mark.parametrize("victim", ["worker", "core"])
def test_kill_9_is_noticed(kind: tuple[str, str], victim: str, busy: bool) -> None:
    where, executor = kind
    if (victim == "worker" and executor == "uni") or (victim == "core" and where == "in process"):
        pytest.skip("that is this very process")
    client = make_client(*kind, hf_overrides={"step_seconds": 0.01})
    pid = client.call("worker", "hello")["pid"] if victim == "worker" else client.pid  # type: ignore[attr-defined]
    if busy:
        client.add(make_request("a", [1], 200))
        assert client.poll(PATIENCE).each()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        read_for(client, PATIENCE, [])
    client.shutdown()


@pytest.mark.parametrize("victim", ["worker", "core"])
def test_asyncio_notices_a_death_too(victim: str) -> None:
    client = make_client("process", "mp")
    pid = client.call("worker", "hello")["pid"] if victim == "worker" else client.pid  # type: ignore[attr-defined]

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.1, os.kill, pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async for _ in client.outputs():
                pass

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    client.shutdown()


def test_a_core_that_ignores_signals_ends_with_its_client() -> None:
    client = make_client("process", "mp")
    os.kill(client.pid, signal.SIGTERM)  # type: ignore[attr-defined]
    os.kill(client.pid, signal.SIGINT)  # type: ignore[attr-defined]
    assert len(generate(client)) == 12
    client.shutdown()


def test_a_hung_step_does_not_hold_up_the_shutdown(monkeypatch) -> None:
    monkeypatch.setattr("quire.engine.remote._GRACE", 0.3)
    client = make_client("process", "uni", hf_overrides={"step_seconds": 60})
    client.add(make_request("a", [1], 2))
    assert client.poll(0.2) == EngineOutputs()
    assert time.monotonic() - client.last_heard >= 0.2
    client.shutdown()


@pytest.mark.parametrize("kind", KINDS[2:], ids=str)
def test_an_idle_engine_takes_no_cpu(kind: tuple[str, str]) -> None:
    client = make_client(*kind)
    generate(client)
    us = psutil.Process()
    processes = [us, *us.children(recursive=True)]
    reader = threading.Thread(target=lambda: client.poll(5.2))
    reader.start()
    time.sleep(0.2)

    def used() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in processes)

    before = used()
    time.sleep(5)
    assert used() - before <= 0.05  # 1 % of a core
    reader.join()
    client.shutdown()


ORPHAN_SCRIPT = """
import sys, time, psutil
from tests.effort import sampled
from tests.engine.echo_worker import NAME, make_request, make_resolved
from quire.engine.client import ProcessClient
client = ProcessClient(make_resolved(executor="mp", hf_overrides={"step_seconds": float(sys.argv[1])}), NAME)
client.add(make_request("a", [1], 200))
print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
time.sleep(60)
"""


def all_end(processes: list[psutil.Process]) -> bool:
    """Whether all of them end; orphans may stay zombies if nobody in a container reaps them."""

    def ended(process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    deadline = time.monotonic() + PATIENCE
    while not (done := all(map(ended, processes))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return done


@pytest.mark.parametrize("step_seconds", ["0.001", "60"])
def test_children_die_with_a_parent_that_was_killed(step_seconds: str) -> None:
    env = {**os.environ, "TMPDIR": str(tempfile.gettempdir())}
    command = [sys.executable, "-c", ORPHAN_SCRIPT, step_seconds]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all_end(children)


def test_a_script_that_forgets_to_shut_down_ends_clean() -> None:
    code = ORPHAN_SCRIPT.replace("time.sleep(60)", "print(client._child._folder, flush=True)")
    done = subprocess.run(
        [sys.executable, "-c", code, "0.001"], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    pids, folder = done.stdout.splitlines()
    assert not Path(folder).exists()
    assert all_end([psutil.Process(int(pid)) for pid in pids.split() if psutil.pid_exists(int(pid))])
    assert done.stderr == ""
