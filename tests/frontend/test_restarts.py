"""Requests go on when the engine that has them dies, and those that kill engines end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.engine.client import EngineClient, InProcessClient, ProcessClient
from quire.engine.lives import Death, Lives
from quire.foundation.errors import EngineDeadError
from quire.frontend.async_engine import AsyncLLM
from quire.frontend.journal import Journal
from quire.types.output import STEP_FAILED, RequestOutput
from quire.types.sampling import RequestOutputKind, SamplingParams
from tests.engine.echo_worker import NAME, expected, make_request, make_resolved

POISON = 666
KINDS = [(InProcessClient, "mp"), (ProcessClient, "uni"), (ProcessClient, "mp")]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["in process, mp", "process, uni", "process, mp"])


def make_client(kind: tuple[type, str], **options: Any) -> EngineClient:
    client: EngineClient = kind[0](make_resolved(executor=kind[1], **options), NAME)
    return client


def prompts(count: int) -> list[list[int]]:
    return [[number + 1, 2, 3] * (number % 7 + 1) for number in range(count)]


def generate(llm: LLM, given: list[list[int]], max_tokens: int) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False)
    return llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)


def restarts(client: EngineClient) -> int:
    count: int = client.call("stats").get("num_restarts", 0)
    return count


# -- deaths ------------------------------------------------------------------------------------------------------


@kinds
def test_an_offline_run_outlives_its_engine(kind: tuple[type, str]) -> None:
    client = make_client(kind, hf_overrides={"step_seconds": 0.004})
    victim = client.call("worker", "hello")["pid"]
    with LLM.from_client(client, None) as llm:
        threading.Timer(0.25, os.kill, (victim, signal.SIGKILL)).start()
        outputs = generate(llm, prompts(20), 60)
        assert [output.outputs[0].token_ids for output in outputs] == [expected(ids, 60) for ids in prompts(20)]
        assert restarts(client) == 1
        os.kill(client.call("worker", "hello")["pid"], signal.SIGKILL)  # amid nothing
        assert generate(llm, prompts(1), 5)[0].outputs[0].token_ids == expected(prompts(1)[0], 5)
        client.call("check")


@kinds
def test_an_engine_that_fails_now_and_again_gets_there(kind: tuple[type, str]) -> None:
    with LLM.from_client(make_client(kind, hf_overrides={"fail_at_step": 12}), None) as llm:
        outputs = generate(llm, prompts(3), 30)
        assert [output.outputs[0].token_ids for output in outputs] == [expected(ids, 30) for ids in prompts(3)]


def test_counters_go_on_where_they_stood() -> None:
    client = make_client((ProcessClient, "mp"), hf_overrides={"step_seconds": 0.002})
    with LLM.from_client(client, None) as llm:
        generate(llm, prompts(4), 20)
        before = client.call("stats")
        os.kill(client.call("worker", "hello")["pid"], signal.SIGKILL)
        generate(llm, prompts(4), 20)
        after = client.call("stats")
        assert after["generation_tokens"] - before["generation_tokens"] == 80
        assert after["prompt_tokens"] - before["prompt_tokens"] == sum(map(len, prompts(4)))
        assert after["num_steps"] > before["num_steps"]


def test_an_engine_in_this_very_process_does_not_come_back() -> None:
    client = make_client((InProcessClient, "uni"), hf_overrides={"fail_at_step": 5})
    with LLM.from_client(client, None) as llm, pytest.raises(EngineDeadError, match="step 5 failed"):
        generate(llm, prompts(3), 30)


def test_none_is_started_again_if_that_is_not_wanted() -> None:
    client = make_client((ProcessClient, "uni"), hf_overrides={"fail_at_step": 5}, max_engine_restarts=0)
    with LLM.from_client(client, None) as llm, pytest.raises(EngineDeadError, match="step 5 failed"):
        generate(llm, prompts(3), 30)


def test_streams_wait_and_so_does_who_comes_meanwhile() -> None:
    async def main() -> None:
        client = make_client((ProcessClient, "mp"), hf_overrides={"step_seconds": 0.004}, max_num_queued_reqs=2)
        llm = AsyncLLM(client, None)
        params = SamplingParams(
            max_tokens=80, temperature=0, detokenize=False, output_kind=RequestOutputKind.DELTA
        )  # fmt: skip

        async def stream(number: int) -> list[int]:
            ids = prompts(20)[number]
            found: list[int] = []
            async for output in llm.generate({"prompt_token_ids": ids}, params, f"r{number}"):
                assert output.outputs[0].finish_reason in (None, "length"), output
                found += output.outputs[0].token_ids
            return found

        early = [asyncio.create_task(stream(number)) for number in range(8)]
        await asyncio.sleep(0.1)
        victim = (await llm.call("worker", "hello"))["pid"]
        os.kill(victim, signal.SIGKILL)
        while llm.outage is None:
            await asyncio.sleep(0.01)
        assert "SIGKILL" in str(llm.outage)
        assert llm.stats().num_running == 0
        late = [asyncio.create_task(stream(number)) for number in range(8, 20)]
        gone = asyncio.create_task(anext(llm.generate({"prompt_token_ids": [7]}, params, "gone")))
        await asyncio.sleep(0)
        gone.cancel()
        assert (await llm.call("stats"))["num_restarts"] == 1  # it waits, too
        assert await asyncio.gather(*early, *late) == [expected(ids, 80) for ids in prompts(20)]
        assert llm.outage is None
        await llm.refresh_stats()
        assert llm.stats().num_running == llm.stats().num_waiting == 0
        llm.shutdown()

    asyncio.run(main())


def test_a_shutdown_does_not_wait_for_the_next_engine(tmp_path: Path) -> None:
    refusal = tmp_path / "refusal"

    async def main() -> None:
        client = make_client((ProcessClient, "uni"), hf_overrides={"refuse_if": str(refusal)}, max_engine_restarts=99)
        llm = AsyncLLM(client, None)
        refusal.touch()
        os.kill(client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        while llm.outage is None:
            await asyncio.sleep(0.01)
        reader = asyncio.create_task(anext(llm.generate({"prompt_token_ids": [7]}, SamplingParams(), "a")))
        await asyncio.sleep(0.1)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await reader

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_start_that_fails_is_tried_again_and_not_for_ever(tmp_path: Path) -> None:
    refusal = tmp_path / "refusal"
    client = make_client((ProcessClient, "uni"), hf_overrides={"refuse_if": str(refusal)}, max_engine_restarts=2)
    with LLM.from_client(client, None) as llm:
        refusal.touch()
        os.kill(client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        threading.Timer(0.3, refusal.unlink).start()
        assert generate(llm, prompts(1), 5)[0].outputs[0].token_ids == expected(prompts(1)[0], 5)
        refusal.touch()
        os.kill(client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match=r"it cannot be started again: echo has no room yet \(death 3"):
            generate(llm, prompts(1), 5)
        with pytest.raises(EngineDeadError):
            generate(llm, prompts(1), 5)


# -- who it was --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "how"), [
    (KINDS[0], "poison"), (KINDS[1], "poison"), (KINDS[1], "deadly"),
    pytest.param(KINDS[0], "deadly", marks=pytest.mark.long),
    pytest.param(KINDS[2], "poison", marks=pytest.mark.long),
    pytest.param(KINDS[2], "deadly", marks=pytest.mark.long),
], ids=str)  # fmt: skip
def test_a_request_that_kills_engines_ends_and_no_other_does(kind: tuple[type, str], how: str) -> None:
    """With the others it runs in two, and then alone: once if its step raises, more often if the engine is killed."""
    with LLM.from_client(make_client(kind, hf_overrides={how: POISON}, max_num_seqs=16), None) as llm:
        given = [*prompts(9), [1, POISON, 3], *prompts(20)[9:]]
        outputs = generate(llm, given, 40)
        bad = outputs.pop(9)
        assert [output.outputs[0].token_ids for output in outputs] == [expected(ids, 40) for ids in prompts(20)]
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
        assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", STEP_FAILED)
        assert bad.error is not None
        assert "died" in bad.error
        assert restarts(llm._client) == (3 if how == "poison" else 5)


def test_suspects_come_in_one_by_one() -> None:
    client = make_client((InProcessClient, "uni"), hf_overrides={"step_seconds": 0.001})
    for number in range(5):
        client.add(make_request(f"r{number}", [number + 1], 6), again=True, suspect=number > 0)
    first: dict[str, int] = {}
    left = {f"r{number}" for number in range(5)}
    step = 0
    while left:
        for output in client.poll(5).each():
            first.setdefault(output.request_id, step)
            if output.finish_reason is not None:
                left.remove(output.request_id)
        step += 1
    assert first["r0"] == first["r1"] == 0
    assert sorted(first[f"r{number}"] for number in range(1, 5)) == [first[f"r{number}"] for number in range(1, 5)]
    assert len({first[f"r{number}"] for number in range(1, 5)}) == 4
    assert client.call("stats").get("num_waiting", 0) == 0
    client.shutdown()


def test_a_suspect_may_be_aborted_before_its_turn() -> None:
    client = make_client((InProcessClient, "uni"))
    for number in range(4):
        client.add(make_request(f"r{number}", [number + 1], 4), again=True, suspect=True)
    client.abort(["r0", "r2"])
    ended = set()
    while len(ended) < 2:
        ended |= {output.request_id for output in client.poll(5).each() if output.finish_reason}
    assert ended == {"r1", "r3"}
    client.shutdown()


def test_who_advances_is_no_suspect() -> None:
    journal, tokens = Journal(), {name: [] for name in "abc"}  # type: dict[str, list[int]]
    client = Book()
    for name, answer in tokens.items():
        request = make_request(name, [1], 9)
        journal.open(request, answer)
        journal.send(client, request)  # type: ignore[arg-type]
    assert client.take() == {"a": ([], False), "b": ([], False), "c": ([], False)}
    for _ in range(3):
        tokens["a"].append(5)
        assert journal.bury(Death("gone")) == []
        journal.send_again(client, journal.unsent())  # type: ignore[arg-type]
        assert client.take()["a"] == (tokens["a"], False)
    assert not journal.bury(Death("gone", ids=frozenset("a")))
    journal.close("c")
    journal.send_again(client, journal.unsent())  # type: ignore[arg-type]
    assert client.take() == {"a": (tokens["a"], True), "b": ([], True)}
    assert not journal.bury(Death("killed", was_killed=True, on_trial="a"))
    journal.send_again(client, journal.unsent())  # type: ignore[arg-type]
    assert list(client.take()) == ["b", "a"]  # who has been on trial comes later
    assert not journal.bury(Death("failed", ids=frozenset("b"), on_trial="a"))  # it was not in that step
    journal.send_again(client, journal.unsent())  # type: ignore[arg-type]
    [end] = journal.bury(Death("failed", ids=frozenset("ab"), on_trial="a"))
    assert (end.request_id, end.finish_reason, end.stop_reason) == ("a", "error", STEP_FAILED)


class Book:
    """A client that writes down what it gets."""

    can_restart = True

    def __init__(self) -> None:
        self._added: dict[str, tuple[list[int], bool]] = {}

    def add(self, request: Any, *, again: bool = False, suspect: bool = False) -> None:
        assert again or not request.given
        self._added[request.id] = request.given, suspect

    def take(self) -> dict[str, tuple[list[int], bool]]:
        taken, self._added = self._added, {}
        return taken


def test_lives_end_when_nobody_gets_a_token() -> None:
    lives = Lives(2)
    for served in (True, False, True, False, False):
        lives.end("x", served=served)
    with pytest.raises(EngineDeadError, match="death 3 in a row"):
        lives.end("x", served=False)
    assert lives.is_over
    lives = Lives(9)
    assert [lives.end_at_start("x") for _ in range(6)] == [0.5, 1, 2, 4, 8, 8]
    with pytest.raises(EngineDeadError, match=r"^x$"):
        Lives(0).end("x", served=True)
