"""However requests end, operators hear of it: the gauges come to rest, and what came has ended.

The real core, scheduler, front end and generation over a worker without a model, all on one event loop, so that an
order of events is the same in every run.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config.serve import ServeConfig
from quire.engine.in_process import InProcessClient
from quire.engine.messages import ToCore
from quire.frontend.async_engine import AsyncLLM
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.server.generate.generation import Generation, PromptIds
from quire.server.service import Service
from quire.types.output import EngineOutputs
from quire.types.sampling import RequestOutputKind, SamplingParams
from tests.engine.echo_worker import NAME, make_resolved
from tests.frontend.tokenizers_for_tests import byte_level, save_folder

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "quire:seats_used")
QUIET_TURNS = 50  # of the event loop, with nothing left to do


class SteppedClient(InProcessClient):
    """Its core takes a turn whenever the event loop comes by and there is something to do."""

    def __init__(self, *args: Any) -> None:
        self.num_idle = 0  # visits without anything to do, since the last with
        super().__init__(*args)
        self._has_mail = False

    def _send(self, message: ToCore) -> None:
        self._has_mail = True
        super()._send(message)

    async def outputs(self) -> AsyncGenerator[EngineOutputs, None]:
        while True:
            if self._has_mail or self._core.has_work:
                self._has_mail, self.num_idle = False, 0
                yield self.poll(0)
            else:
                self.num_idle += 1
            await asyncio.sleep(0)


class Simulation:
    """Requests come, are read, left, aborted by id; in between the engine takes turns."""

    def __init__(self, seed: int, depth: int, folder: Any) -> None:
        self.random = random.Random(seed)
        options = {"enable_log_requests": True, "max_num_queued_reqs": self.random.choice([2, None])}
        resolved = make_resolved(depth=depth, max_num_seqs=4, num_gpu_blocks_override=24, **options)
        self.client = SteppedClient(resolved, NAME)
        self.engine = AsyncLLM(self.client, Tokenizer(folder))
        self.service = Service(resolved.config, ServeConfig())
        self.service.attach(self.engine)
        self.readers: dict[str, asyncio.Task[None]] = {}
        self.num_answers = 0

    async def run(self, events: int) -> None:
        for number in range(events):
            getattr(self, self.random.choice(["come", "come", "leave", "abort", "pause"]))(number)
            for _ in range(self.random.choice([0, 1, 3, 20])):
                await asyncio.sleep(0)
        for name in list(self.readers):
            self.leave_by_name(name)
        while self.client.num_idle < QUIET_TURNS:
            await asyncio.sleep(0)

    def come(self, number: int) -> None:
        draw = self.random
        size = draw.choice([0, 1, 5, 40, 300])  # none and too many are refused, at the door or by the core
        params = SamplingParams(
            n=draw.choice([1, 1, 3]),
            max_tokens=draw.choice([1, 5, 60]),
            stop=draw.choice([[], ["e"], ["zz"]]),
            output_kind=draw.choice([RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY]),
        )
        prompts = [PromptIds([draw.randrange(400) for _ in range(size)]) for _ in range(draw.choice([1, 1, 2]))]
        name = f"r{number}"
        job = Generation(self.service, name, "echo", prompts, params, 0, None, name)
        self.readers[name] = asyncio.create_task(self.read(job))

    async def read(self, job: Generation) -> None:
        try:
            async for _ in job.outputs():
                await asyncio.sleep(0)
        except Exception:  # refused
            pass

    def leave(self, _number: int) -> None:
        if self.readers:
            self.leave_by_name(self.random.choice(list(self.readers)))

    def leave_by_name(self, name: str) -> None:
        self.readers.pop(name).cancel()

    def abort(self, _number: int) -> None:
        running = [request_state.request_id for request_state in self.engine._processor.running()]
        for request_id in self.random.sample(running, min(2, len(running))):
            self.engine._abort(request_id)

    def pause(self, _number: int) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        """As the last report of the core has left them: it is not asked."""
        assert self.service.metrics is not None
        text = self.service.metrics.render(self.engine.stats()).decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {s.name + s.labels.get("finished_reason", ""): s.value for s in samples}


@pytest.fixture
def folder(tmp_path: Any) -> Any:
    return save_folder(tmp_path, byte_level(), eos_token="<|end|>")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "quire"):
        yield caplog


def told(log: pytest.LogCaptureFixture, message: str) -> Counter[str]:
    """Requests of which the core has said so."""
    return Counter(r.request_id for r in log.records if r.message == message)  # type: ignore[attr-defined]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_gauges_come_to_rest_and_what_came_has_ended(
    log: pytest.LogCaptureFixture, folder: Any, seed: int, depth: int
) -> None:
    async def main() -> None:
        simulation = Simulation(seed, depth, folder)
        try:
            await asyncio.wait_for(simulation.run(80), 60)
            metrics = simulation.metrics()
            assert {name: metrics[name] for name in GAUGES} == dict.fromkeys(GAUGES, 0.0)
            assert metrics["quire:kv_blocks_free"] == metrics["quire:kv_blocks"]
            assert simulation.service.progress.num_waiting == 0
            simulation.client.call("check")
        finally:
            simulation.engine.shutdown()
        came = told(log, "request came")
        assert len(came) > 20
        assert told(log, "request ended") == came
        # The front end counts answers: those it has asked for, and how each of them ended.
        lines = [r.getMessage() for r in log.records if r.name == "quire.server.generate.generation"]
        asked = {line.split()[1]: int(line.rpartition("n=")[2]) for line in lines if "prompt tokens" in line}
        ended = Counter(line.split()[1] for line in lines if "prompt tokens" not in line)
        assert ended == Counter(dict.fromkeys(asked, 1))
        counts = {name: count for name, count in metrics.items() if name.startswith("vllm:request_success_total")}
        assert sum(counts.values()) == sum(asked.values())
        assert counts["vllm:request_success_totalabort"] > 0

    asyncio.run(main())


@pytest.mark.parametrize("how", ["disconnect", "by id", "stop string", "engine ends"])
def test_an_end_is_counted_and_logged_by_its_reason(log: pytest.LogCaptureFixture, folder: Any, how: str) -> None:
    async def main() -> None:
        simulation = Simulation(0, 2, folder)
        stop = ["e", "a", "t", "o"] if how == "stop string" else []
        params = SamplingParams(max_tokens=200, stop=stop, output_kind=RequestOutputKind.DELTA)
        job = Generation(simulation.service, "r", "echo", [PromptIds([5, 6])], params, 0, None, "r")
        reader = asyncio.create_task(simulation.read(job))
        while simulation.engine.stats().num_steps < 3 and not reader.done():
            await asyncio.sleep(0)
            simulation.engine._stats = simulation.client._core.stats()
        if how == "disconnect":
            reader.cancel()
        elif how == "by id":
            await simulation.engine.abort("r")
        elif how == "engine ends":
            simulation.engine.shutdown()
        await asyncio.wait((reader,))
        while how != "engine ends" and simulation.client.num_idle < QUIET_TURNS:
            await asyncio.sleep(0)
        metrics = simulation.metrics()
        reason = {"stop string": "stop", "engine ends": "error"}.get(how, "abort")
        counts = {name: metrics[f"vllm:request_success_total{name}"] for name in ("stop", "abort", "error", "length")}
        assert {name for name, count in counts.items() if count} == {reason}
        simulation.engine.shutdown()

    asyncio.run(main())
    assert told(log, "request came") == told(log, "request ended") == Counter({"r": 1})
    reasons = [r.reason for r in log.records if r.message == "request ended"]  # type: ignore[attr-defined]
    assert reasons == ["stop" if how == "stop string" else "abort"]
