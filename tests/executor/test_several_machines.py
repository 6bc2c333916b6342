"""Ranks that come by invitation, over TCP: from `quire worker`, whoever starts it, and as actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.client import ProcessClient
from quire.executor.external import KEY, MASTER, ExternalExecutor, knock
from quire.executor.messages import FromWorker
from quire.executor.several_machines import own_address
from quire.foundation.errors import ConfigError, EngineDeadError
from quire.foundation.remote import Guest, Invitation, RemoteChild, interface_of
from quire.types.ranks import Rank
from tests.engine.echo_worker import NAME, expected, make_resolved
from tests.executor.test_ranks import first_plans
from tests.server.process import wait_until

ROOT = Path(__file__).parents[2]
RANKS = 2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def workers(count: int, **environment: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`quire worker`, so many."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "quire.cli.main", "worker", "--rank"]
    made = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=env, process_group=0) for rank in range(count)
    ]  # fmt: skip
    try:
        yield made
    finally:
        for one in made:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> str:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv(MASTER, address)
    monkeypatch.setenv(KEY, "secret")
    return address


@pytest.mark.usefixtures("master")
def test_ranks_that_others_start_run_every_plan_and_are_watched() -> None:
    with workers(RANKS):
        resolved = make_resolved(executor="external", tensor_parallel_size=RANKS)
        executor = ExternalExecutor(resolved, NAME)
        executor.report = executor.start()  # type: ignore[attr-defined]
        scheduler, plans = first_plans(executor, 4)
        futures = [executor.submit(plan) for plan in plans]
        tokens = [
            token
            for plan, future in zip(plans, futures, strict=True)
            for output in scheduler.settle(plan, future.result()).each()
            for token in output.token_ids
        ]
        assert tokens == expected([1, 2, 3], 4)
        assert [answer["rank"] for answer in executor.call_each("hello")] == [0, 1]
        assert executor.call("hello")["pid"] == executor.pid
        executor.ping()
        executor.check_health()
        os.kill(executor.pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker process of rank 1 .* on 127.0.0.1 is gone"):
            executor.receive(20)
        executor.shutdown()


@pytest.mark.usefixtures("master")
def test_an_engine_goes_on_when_a_rank_elsewhere_dies() -> None:
    with workers(RANKS):
        options: dict[str, Any] = {"hf_overrides": {"step_seconds": 0.004}, "tensor_parallel_size": RANKS}
        client = ProcessClient(make_resolved(executor="external", **options), NAME)
        with LLM.from_client(client, None) as llm:
            victim = client.call("workers", "hello")[1]["pid"]
            threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
            prompts = [[number + 1, 2, 3] for number in range(12)]
            params = SamplingParams(max_tokens=100, temperature=0, detokenize=False)
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == [expected(ids, 100) for ids in prompts]
            assert client.call("stats")["num_restarts"] == 1


def test_the_demo_model_on_two_ranks_that_meet_over_tcp(master: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    with LLM(device="cpu", dtype="float32", num_threads=1, max_num_seqs=4) as llm:
        wanted = [output.outputs[0].text for output in llm.generate(["One", "Two and"], params, use_tqdm=False)]
    assert master
    with workers(RANKS), LLM(
        device="cpu", dtype="float32", num_threads=1, max_num_seqs=4, tensor_parallel_size=RANKS,
        distributed_executor_backend="external",
    ) as llm:  # fmt: skip
        assert [output.outputs[0].text for output in llm.generate(["One", "Two and"], params, use_tqdm=False)] == wanted


def test_who_has_no_key_or_no_number_is_sent_away(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    made: list[ExternalExecutor] = []
    resolved = make_resolved(executor="external", tensor_parallel_size=RANKS)
    waiting = threading.Thread(target=lambda: made.append(ExternalExecutor(resolved, NAME)))
    waiting.start()

    def answer(rank: int) -> str:
        while True:
            try:
                knock(rank)
                return ""
            except OSError:
                time.sleep(0.02)
            except ConfigError as error:
                return str(error)

    assert "rank 7 is none of the 2 ranks" in answer(7)
    monkeypatch.setenv(KEY, "guessed")
    assert "the key is not that of the core" in answer(0)
    monkeypatch.setenv(KEY, "secret")
    with socket.create_connection(("127.0.0.1", int(master.split(":")[1]))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with workers(RANKS):
        waiting.join(60)
        assert made
        made[0].start()
        made[0].shutdown()


def test_an_invitation_is_for_who_has_it() -> None:
    child = RemoteChild[FromWorker](FromWorker, "rank", "127.0.0.1")
    assert Invitation.read(child.invitation.text()) == child.invitation
    with pytest.raises(ConfigError, match="no invitation"):
        Invitation.read("nothing")
    with socket.create_connection(("127.0.0.1", child.invitation.port)) as stranger:
        stranger.sendall(b'{"token": "wrong", "pid": 1, "host": "x", "down": 1, "key": "", "meeting": 1}\n')
        with pytest.raises(EngineDeadError, match="the rank has not come within"):
            child.admit(0.3)
    child.stop()
    assert interface_of("127.0.0.1") == "lo"
    assert own_address("127.0.0.1") == "127.0.0.1"
    guest = Guest("", 1, "10.0.0.1", 1, "", 29500, device=3)
    assert Rank(7, 8, f"tcp://{guest.host}:{guest.meeting}", device=guest.device).place == 3
    assert Rank(7, 8).place == 7


@pytest.mark.parametrize(("name", "message"), [(MASTER, "QUIRE_MASTER must be HOST:PORT"), (KEY, "must be set")])
def test_what_the_environment_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, master: str, name: str, message: str
) -> None:
    assert master
    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=message):
        ExternalExecutor(make_resolved(executor="external", tensor_parallel_size=RANKS), NAME)


# -- Ray ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Two nodes on this machine, of one processor each: two ranks have room on both together only."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made.address
    ray.shutdown()
    made.shutdown()  # type: ignore[no-untyped-call]


def test_ranks_are_actors_and_one_that_is_killed_is_replaced(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    options: dict[str, Any] = {"hf_overrides": {"step_seconds": 0.004}, "tensor_parallel_size": RANKS}
    client = ProcessClient(make_resolved(executor="ray", **options), NAME)
    with LLM.from_client(client, None) as llm:
        pids = [answer["pid"] for answer in client.call("workers", "hello")]
        assert len(set(pids)) == RANKS
        threading.Timer(0.2, os.kill, (pids[1], signal.SIGKILL)).start()
        prompts = [[number + 1, 2, 3] for number in range(12)]
        params = SamplingParams(max_tokens=100, temperature=0, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [expected(ids, 100) for ids in prompts]
        assert client.call("stats")["num_restarts"] == 1
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)


def test_the_demo_model_over_a_ray_cluster(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    params = SamplingParams(max_tokens=12, temperature=0)
    found = []
    for options in ({}, {"tensor_parallel_size": RANKS, "distributed_executor_backend": "ray"}):
        with LLM(device="cpu", dtype="float32", num_threads=1, max_num_seqs=4, **options) as llm:  # type: ignore[arg-type]
            found.append(
                [output.outputs[0].text for output in llm.generate(["One", "Two and"], params, use_tqdm=False)]
            )
    assert found[0] == found[1]
