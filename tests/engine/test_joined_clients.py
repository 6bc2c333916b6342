"""Several clients of one core process: each hears its own news only, and takes its requests with it when it goes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.client import JoinedClient, ProcessClient
from quire.engine.clients import PARENT, Shares
from quire.foundation.errors import EngineDeadError
from quire.types.output import INVALID_REQUEST, EngineOutput, EngineOutputs, EngineStats
from tests.engine.echo_worker import NAME, expected, make_request, make_resolved
from tests.server.process import PATIENCE


class Group:
    """A core, its parent, and clients that have joined."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.parent = ProcessClient(make_resolved(executor="uni", **options), NAME)
        self._folder = folder
        self.joined: dict[int, JoinedClient] = {}

    def join(self, number: int) -> JoinedClient:
        folder = self._folder / str(number)
        folder.mkdir()
        client = self.joined[number] = JoinedClient(self.parent.info, folder)
        self.parent.join(number, folder)
        return client

    def close(self) -> None:
        for number, client in self.joined.items():
            self.parent.leave(number)
            client.shutdown()
        self.parent.shutdown()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    yield made
    made.close()


def read(client: JoinedClient, unfinished: set[str], seconds: float = PATIENCE) -> dict[str, list[int]]:
    """The tokens of `unfinished` until all have ended; others must not be heard of."""
    tokens: dict[str, list[int]] = {name: [] for name in unfinished}
    deadline = time.monotonic() + seconds
    while unfinished:
        assert time.monotonic() < deadline
        for output in client.poll(1).each():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                assert output.finish_reason == "length", output.error
                unfinished.discard(output.request_id)
    return tokens


def hear(client: JoinedClient) -> list[EngineOutput]:
    """The next news that are no mere statistics."""
    while not (outputs := client.poll(5).each()):
        pass
    return outputs


def test_each_hears_of_its_own_requests_only(group: Group) -> None:
    clients = [group.join(number) for number in range(3)]
    asked: list[dict[str, list[int]]] = [{}, {}, {}]
    for i in range(30):
        prompt = [i + 1, 2, 3] * (i % 4 + 1)
        asked[i % 3][f"r{i}"] = prompt
        clients[i % 3].add(make_request(f"r{i}", prompt, 5 + i))
    for client, theirs in zip(clients, asked, strict=True):
        tokens = read(client, set(theirs))
        assert tokens == {name: expected(prompt, 5 + int(name[1:])) for name, prompt in theirs.items()}
    assert group.parent.poll(0.05).each() == []


def test_calls_are_answered_to_who_asks(group: Group) -> None:
    one, two = group.join(0), group.join(1)
    for _ in range(5):
        assert [c.call("worker", "hello", n)["args"] for n, c in enumerate((one, two, group.parent))] == [[0], [1], [2]]
    with pytest.raises(Exception, match="no utility"):
        two.call("nothing")


def test_an_id_belongs_to_who_had_it_first(tmp_path: Path) -> None:
    group = Group(tmp_path, hf_overrides={"step_seconds": 0.01})
    one, two = group.join(0), group.join(1)
    one.add(make_request("same", [7], 40))
    assert hear(one)
    two.add(make_request("same", [8], 5))
    (refusal,) = hear(two)
    assert (refusal.finish_reason, refusal.stop_reason) == ("error", INVALID_REQUEST)
    assert "in use" in (refusal.error or "")
    two.abort(["same"])  # it is not theirs
    two.call("ping")
    rest = read(one, {"same"})
    assert len(rest["same"]) >= 30
    two.add(make_request("same", [8], 5))  # free now
    assert read(two, {"same"}) == {"same": expected([8], 5)}
    group.close()


def test_who_leaves_takes_its_requests_along(tmp_path: Path) -> None:
    group = Group(tmp_path, hf_overrides={"step_seconds": 0.005})
    one, two = group.join(0), group.join(1)
    for i in range(10):
        one.add(make_request(f"a{i}", [i + 1, 5], 200))
        two.add(make_request(f"b{i}", [i + 1, 6], 60))
    assert hear(one)
    group.parent.leave(0)
    assert read(two, {f"b{i}" for i in range(10)}) == {f"b{i}": expected([i + 1, 6], 60) for i in range(10)}
    stats = group.parent.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_seats_used) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    again = group.join(2)  # with an id that the one before had
    again.add(make_request("a0", [9], 5))
    assert read(again, {"a0"}) == {"a0": expected([9], 5)}
    group.close()


def test_the_others_hear_that_one_has_left(tmp_path: Path) -> None:
    group = Group(tmp_path, hf_overrides={"step_seconds": 0.005})
    one, two = group.join(0), group.join(1)
    for i in range(10):
        one.add(make_request(f"a{i}", [i + 1], 200))
    while not (stats := two.poll(5).stats) or not stats.num_running:
        pass
    group.parent.leave(0)
    while not (stats := two.poll(5).stats) or stats.num_running:
        pass
    assert (stats.num_waiting, stats.num_seats_used, stats.kv_usage) == (0, 0, 0.0)
    group.close()


def test_an_abort_storm_of_all_of_them_leaves_nothing(group: Group) -> None:
    rng = random.Random(2)
    clients = [group.join(number) for number in range(3)]
    alive: list[set[str]] = [set(), set(), set()]
    gone: set[str] = set()
    for i in range(240):
        number = rng.randrange(3)
        clients[number].add(make_request(f"r{i}", [i % 90 + 1] * rng.randrange(1, 40), 40))
        alive[number].add(f"r{i}")
        if i % 3 == 0:
            victims = rng.sample(sorted(alive[number]), rng.randrange(len(alive[number]) + 1))
            clients[number].abort(victims)
            alive[number].difference_update(victims)
            gone.update(victims)
        for output in clients[number].poll(0).each():
            assert output.request_id in alive[number]
            assert output.request_id not in gone
            if output.finish_reason:
                alive[number].discard(output.request_id)
    for client, theirs in zip(clients, alive, strict=True):
        client.abort(sorted(theirs))
        client.call("check")
    stats = clients[0].stats()
    assert (stats.num_running, stats.num_waiting, stats.num_seats_used) == (0, 0, 0)


def test_statistics_reach_all_and_steps_count_once(group: Group) -> None:
    clients = [group.join(number) for number in range(2)]
    clients[1].add(make_request("a", [1, 2, 3], 20))
    told: list[list[EngineStats]] = [[], []]
    for client, stats in zip(clients, told, strict=True):
        while not any(s.generation_tokens == 20 for s in stats):
            news = client.poll(5)
            stats += [news.stats] if news.stats is not None else []
    assert sum(sum(s.step_tokens) for s in told[0]) == 3 + 19
    assert sum(sum(s.step_tokens) for s in told[1]) == 0


@pytest.mark.parametrize("how", ["killed", "failed step"])
def test_a_dead_core_ends_them_all(tmp_path: Path, how: str) -> None:
    group = Group(tmp_path, hf_overrides={"fail_at_step": 5} if how == "failed step" else {"step_seconds": 0.01})

    async def main() -> None:
        clients = [group.join(number) for number in range(2)]
        clients[0].add(make_request("a", [1], 200))
        readings = [asyncio.create_task(drain(client)) for client in clients]
        await asyncio.sleep(0.2)
        if how == "killed":
            os.kill(group.parent.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await asyncio.to_thread(group.parent.call, "ping")
            for client in clients:
                client.die("the core is dead")  # what its parent is to say
        for reading in readings:
            with pytest.raises(EngineDeadError, match=r"dead|step 5 failed"):
                await asyncio.wait_for(reading, PATIENCE)
        with pytest.raises(EngineDeadError):
            clients[1].add(make_request("b", [1], 1))

    async def drain(client: JoinedClient) -> None:
        async for _ in client.outputs():
            pass

    asyncio.run(main())
    group.close()


def test_what_a_client_knows_is_not_cut_again() -> None:
    owners = {f"r{i}": i % 2 for i in range(6)}
    shares = Shares(owners)
    ids = [f"r{i}" for i in range(6)]
    first = shares.split(EngineOutputs(ids=ids, tokens=list(range(6))))
    assert {c: (s.ids, s.tokens) for c, s in first.items()} == {
        0: (["r0", "r2", "r4"], [0, 2, 4]),
        1: (["r1", "r3", "r5"], [1, 3, 5]),
    }
    again = shares.split(EngineOutputs(ids=ids, tokens=list(range(10, 16))))
    assert again[0].ids is first[0].ids
    assert again[1].tokens == [11, 13, 15]
    fewer = shares.split(EngineOutputs(ids=ids[:5], tokens=[1] * 5, special=[EngineOutput(request_id="r5")]))
    assert fewer[0].ids is first[0].ids  # nothing changed for this one
    assert (fewer[1].ids, [o.request_id for o in fewer[1].special]) == (["r1", "r3"], ["r5"])
    assert PARENT not in fewer
    several = shares.split(EngineOutputs(ids=ids[:3], tokens=[1, 1, 2, 3, 3, 3], counts=[2, 1, 3]))
    assert {c: (s.ids, s.tokens, s.counts) for c, s in several.items()} == {
        0: (["r0", "r2"], [1, 1, 3, 3, 3], [2, 3]),
        1: (["r1"], [2], [1]),
    }
