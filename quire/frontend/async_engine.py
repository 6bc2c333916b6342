"""AsyncLLM: the one door to an engine for everything that serves."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.config.model import ModelConfig
from quire.config.resolve import resolve
from quire.engine.client import EngineClient, EngineInfo, start_process
from quire.engine.totals import keep_rising
from quire.foundation.aside import LONG, aside
from quire.foundation.errors import ConfigError, EngineDeadError, InputError
from quire.foundation.log import get_logger
from quire.frontend.adapters import AdapterNames, read_adapter
from quire.frontend.beam_search import BeamSearch, alternatives
from quire.frontend.inputs import Prompt, PromptLike, build, main_eos, read_prompt
from quire.frontend.journal import log_death
from quire.frontend.names_elsewhere import NamesElsewhere
from quire.frontend.outputs import OutputProcessor, RequestState
from quire.frontend.pooling import requests as pooling
from quire.frontend.reply_formats import Formats, find_formats
from quire.frontend.templates.chat import ChatTemplate
from quire.frontend.tokenization.tokenizer import Tokenizer, load_tokenizer
from quire.observe.profiling import PhaseClock
from quire.types.adapter import Adapter, LoRARequest
from quire.types.output import (
    BeamSearchSequence,
    CompletionOutput,
    EngineOutputs,
    EngineStats,
    RequestMetrics,
    RequestOutput,
)
from quire.types.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput
from quire.types.request import EngineRequest
from quire.types.sampling import BeamSearchParams, SamplingParams
from quire.types.structured import Constraint
from quire.types.view import EngineView, LifeEvent

ADDED_A_TURN = 64  # requests handed to the engine before it does
OUTPUTS_A_TURN = 256  # outputs turned into text before the event loop gets a turn
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outage:
    """The engine is dead, and another is being started.

    began: time.monotonic(); expected: seconds that it will probably take (0: nobody knows).
    """

    cause: str
    began: float
    expected: float

    @property
    def seconds(self) -> float:
        """So far."""
        return time.monotonic() - self.began

    @property
    def seconds_left(self) -> float:
        """Probably."""
        return max(1.0, self.expected - self.seconds)

    def __str__(self) -> str:
        return f"the engine died and is being started again, for {self.seconds:.0f} s so far: {self.cause}"


class AsyncLLM(NamesElsewhere):
    """Generates for many callers at once, on the event loop it was started in."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None) -> None:
        """Take over a started engine. Needs a running event loop."""
        self._client = client
        self._tokenizer = tokenizer
        self._processor = OutputProcessor(tokenizer)
        self.adapters = AdapterNames()
        self._loading = asyncio.Lock()  # of adapters, one after the other
        self._formats = find_formats(client.info.resolved, tokenizer)
        self._stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] | None = None  # called with each report of the core
        self._interval = client.info.resolved.config.schedule.stream_interval
        self._dead_error: BaseException | None = None
        self.outage: Outage | None = None
        self._up = asyncio.Event()  # no outage, or no engine any more
        self._up.set()
        self._tells = client.owns_engine  # else somebody else tells of its deaths
        self.on_replay: Callable[[int], None] | None = None  # told how many requests go on with another engine
        self._is_shut_down = False
        self._reader = asyncio.get_running_loop().create_task(self._read(), name="quire-outputs")

    @classmethod
    async def start(cls, config: EngineConfig, serving: bool = False, clock: PhaseClock | None = None) -> AsyncLLM:
        """Start an engine in a process of its own.

        Args:
            config: all options.
            serving: a server's defaults for those that are not given.
            clock: told what the time was for.

        Raises:
            ConfigError: an option cannot work; it is named.
        """
        clock = clock or PhaseClock()
        resolved = await asyncio.to_thread(resolve, config, serving=serving)
        clock.lap("configuration")
        tokenizer = await asyncio.to_thread(load_tokenizer, resolved)
        clock.lap("tokenizer")
        client = await asyncio.to_thread(start_process, resolved)
        clock.lap("engine")
        return cls(client, tokenizer)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """`start` for callers that do not await it: the event loop stands still until the engine is there."""
        resolved = resolve(engine_args.create_engine_config())
        tokenizer = load_tokenizer(resolved)
        asyncio.get_running_loop()  # said before the engine starts
        return cls(start_process(resolved), tokenizer)

    # Requests

    async def generate(
        self,
        prompt: PromptLike | Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        constraint: Constraint | None = None,
        lora_request: LoRARequest | None = None,
        trace: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt. Closing the generator aborts the request.

        Args:
            prompt: as `LLM.generate` takes it.
            params: `output_kind` says what each output holds; a slow reader gets fewer and larger ones.
            request_id: of a request that is not running.
            priority: lower comes first, where the engine schedules by priority.
            cache_salt: only requests with the same salt share cached prefixes.
            constraint: what binds each answer (`ReplyPlan.constraint`).
            lora_request: the adapter that it is answered with.
            trace: W3C headers of the span that it belongs to; then `metrics` of its outputs says more.
            data_parallel_rank: number of the core, of several, that is to answer. While that one is being started
                again, any other does.

        Yields:
            The outputs, the last of them with `finished`. One that the engine refuses ends with finish_reason "error".

        Raises:
            InputError: the prompt or its parameters cannot run.
            EngineDeadError: the engine has stopped, and no other takes its place.
        """
        adapter = await self.adapter_of(lora_request)
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "constraint": constraint}
        options |= {"adapter": adapter, "trace": trace, "core": data_parallel_rank}
        request_state = await self._add(prompt, params, request_id, options)
        loop, interval = asyncio.get_running_loop(), self._interval
        try:
            finished = False
            while not finished:
                while not request_state.has_news(interval):
                    self._raise_if_dead()
                    request_state.waiter = waiter = loop.create_future()
                    await waiter
                output = request_state.take()
                finished = output.finished
                yield output
        finally:
            if not request_state.finished:
                self._abort(request_id)

    async def encode(
        self,
        prompt: PromptLike,
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Make the vector of one prompt. Closing the generator aborts the request.

        Args:
            prompt: as `LLM.encode` takes it.
            params: the task, and what it may ask for itself.
            request_id: of a request that is not running.
            priority: as `generate` takes it.
            lora_request: likewise.
            data_parallel_rank: likewise.

        Yields:
            The only output.

        Raises:
            InputError: the prompt or its parameters cannot run.
            RefusedError: the engine does not take it.
            EngineDeadError: the engine has stopped.
        """
        task, adapter = pooling.check_task(params, self.info), await self.adapter_of(lora_request)
        size = len(prompt) if isinstance(prompt, str) else LONG + 1
        given = await aside(partial(pooling.read, prompt, self._tokenizer), size)
        options: dict[str, Any] = {"request_id": request_id, "priority": priority, "adapter": adapter}
        request = pooling.build(given, params, task, self.info, **options, core=data_parallel_rank)
        [request_state] = await self.run([request])
        yield pooling.output(request_state, task, params, self.info)

    async def beam_search(
        self,
        prompt_ids: list[int],
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Search the best answers of one prompt. Closing the generator aborts the search.

        Args:
            prompt_ids: its tokens.
            params: width and length of the search.
            request_id: of a request that is not running.
            priority: as `generate` takes it.
            cache_salt: likewise.
            lora_request: likewise.
            data_parallel_rank: likewise.

        Yields:
            The only output, its answers best first.

        Raises:
            InputError: the prompt or the parameters cannot run.
            RefusedError: the engine does not take it.
            EngineDeadError: the engine has stopped.
        """
        search = BeamSearch(prompt_ids, params, self.info, self._tokenizer)
        metrics, numbers = RequestMetrics(time.time()), itertools.count()
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "arrival": metrics.arrival_time}
        options |= {"adapter": await self.adapter_of(lora_request), "core": data_parallel_rank}
        num_cached = 0
        while not search.is_done:
            requests = []
            for beam in search.running:
                given, name = Prompt(token_ids=beam.tokens), f"{request_id}/{next(numbers)}"
                requests += build(given, search.ask, self.info, self._tokenizer, request_id=name, **options)
            request_states = await self.run(requests)
            if metrics.first_token_time is None:
                num_cached = request_states[0].num_cached_tokens
                metrics.first_scheduled_time = request_states[0].metrics.first_scheduled_time
                metrics.engine = request_states[0].metrics.engine
                metrics.first_token_time = time.time()
            search.take([alternatives(request_state, search.ask.logprobs or 1) for request_state in request_states])
        metrics.finished_time = time.time()
        found = search.result(None).sequences
        answers = [self._answer(index, beam, len(prompt_ids), params) for index, beam in enumerate(found)]
        yield RequestOutput(request_id, None, prompt_ids, answers, True, None, num_cached, metrics)

    def _answer(
        self, index: int, beam: BeamSearchSequence, num_prompt: int, params: BeamSearchParams
    ) -> CompletionOutput:
        ids, tokenizer = beam.tokens[num_prompt:], self._tokenizer
        skip = params.skip_special_tokens and not params.include_stop_str_in_output
        return CompletionOutput(
            index=index,
            text="" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=skip),
            token_ids=ids,
            cumulative_logprob=beam.cum_logprob,
            logprobs=beam.logprobs[: len(ids)],
            finish_reason=beam.finish_reason,
            stop_reason=None if beam.stop_reason == main_eos(self.info, tokenizer) else beam.stop_reason,
        )

    async def run(self, requests: Sequence[EngineRequest]) -> list[RequestState]:
        """Requests without a reader, all at once; their conversions when all have finished.

        Being cancelled aborts them.
        """
        request_states: list[RequestState] = []
        loop = asyncio.get_running_loop()
        try:
            for number, request in enumerate(requests, 1):
                self._raise_if_dead()
                request_states.append(self._processor.add([request], request.id, None))
                self._submit(request)
                if number % ADDED_A_TURN == 0:
                    await asyncio.sleep(0)
            for request_state in request_states:
                while not request_state.finished:
                    self._raise_if_dead()
                    request_state.waiter = waiter = loop.create_future()
                    await waiter
        finally:
            for request_state in request_states:
                if not request_state.finished:
                    self._abort(request_state.request_id)
        return request_states

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests; their readers get a last output with finish_reason "abort". Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._abort(one)

    async def _add(
        self, prompt: PromptLike | Prompt, params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> RequestState:
        self._raise_if_dead()
        given = read_prompt(prompt, takes_embeds=True)
        options["request_id"] = request_id
        size = len(given.token_ids if given.token_ids is not None else given.text or "")
        if given.embeds is not None:
            size = given.embeds.size
        requests = await aside(partial(build, given, params, self.info, self._tokenizer, **options), size)
        self._raise_if_dead()
        request_state = self._processor.add(requests, request_id, given.text)
        try:
            for request in requests:
                self._submit(request)
        except BaseException:
            self._abort(request_id)
            raise
        return request_state

    def _submit(self, request: EngineRequest) -> None:
        if self.outage is None:  # else it has its turn behind those that came before
            self._processor.journal.send(self._client, request)

    def _abort(self, request_id: str) -> None:
        request_state, running = self._processor.abort(request_id)
        if running and self._dead_error is None:
            self._client.abort(running)
        if request_state is not None:
            _wake(request_state)

    # Adapters

    async def adapter_of(self, request: LoRARequest | None) -> Adapter | None:
        """The adapter that a request names, loaded if it was not.

        Raises:
            InputError: it cannot be used.
        """
        if request is None:
            return None
        if isinstance(request, LoRARequest) and (known := self.adapters.find(request)) is not None:
            return known
        async with self._loading:
            if isinstance(request, LoRARequest) and (known := self.adapters.find(request)) is not None:
                return known
            adapter = await asyncio.to_thread(read_adapter, request, self.info)
            try:
                await self.call("load_adapter", *adapter.fields())
            except ConfigError as error:
                raise InputError(str(error), error.field) from None
            if (before := self.adapters.add(request, adapter)) is not None:
                await self.call("drop_adapter", before.key)
        return adapter

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter ahead of its first request. Returns True.

        Raises:
            InputError: it cannot be used.
        """
        await self.adapter_of(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. Requests that run with it go on. Returns whether it was known."""
        async with self._loading:
            if (request := self.adapters.numbered(lora_id)) is None:
                return False
            if (adapter := self.adapters.remove(request.lora_name)) is not None:
                await self.call("drop_adapter", adapter.key)
        return True

    async def list_loras(self) -> set[int]:
        """The ids of the adapters that are known."""
        return {request.lora_int_id for request in self.adapters}

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in the host's memory, whatever others are used. Returns whether it is there.

        Raises:
            InputError: no room would be left for others.
        """
        request = self.adapters.numbered(lora_id)
        known = None if request is None else self.adapters.named(request.lora_name)
        return known is not None and bool(await self.call("pin_adapter", known[1].key))

    # Reading

    async def _read(self) -> None:
        """The only reader of the engine's outputs."""
        try:
            while True:
                try:
                    async for outputs in self._client.outputs():
                        await self._take(outputs)
                    raise EngineDeadError("the engine's outputs have ended")
                except EngineDeadError as error:
                    await self._outlive(error)
        except asyncio.CancelledError:
            self._die(EngineDeadError("the engine was shut down"))
            raise
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:  # a mistake of ours must not leave callers waiting for ever
            self._die(EngineDeadError(f"the front end failed: {type(error).__name__}: {error}"))
            raise

    async def _outlive(self, error: EngineDeadError) -> None:
        """The engine is dead: wait for the next and give it what is open. Raises `error`, or why there will be none."""
        client, journal = self._client, self._processor.journal
        if (death := client.death) is None or not client.can_restart:
            raise error
        if not death.others:
            began = time.monotonic() if self.outage is None else self.outage.began
            self.outage = Outage(death.cause, began, client.restart_seconds)
            self._up.clear()
            self._note_outage()
        self._tell(*self._processor.add_special(journal.bury(death)))
        if self._tells:
            log_death(death, len(journal))
        died = time.time()
        await asyncio.to_thread(client.restart)
        try:
            while entries := journal.unsent():
                journal.send_again(client, entries)
                await asyncio.sleep(0)
        except EngineDeadError:
            return  # `outputs` says so again
        if self.outage is None:
            self._note_replays(self._processor.having(death.lost or ()), died)
            return
        if self._tells:
            _log.warning("the engine is back after %.1f s; %d requests go on", self.outage.seconds, len(journal))
        self._note_replays(self._processor.running(), time.time() - self.outage.seconds)
        self.outage = None
        self._up.set()

    def _note_replays(self, running: Sequence[RequestState], died: float) -> None:
        """These have been given to another engine. died: time.time() when theirs had."""
        if self.on_replay is not None:
            self.on_replay(len(running))
        for request_state in running:
            request_state.metrics.replays.append((died, time.time()))

    def _note_outage(self) -> None:
        """Nothing runs; who ran waits."""
        stats = self._stats
        self._stats = msgspec.structs.replace(
            stats.counted(),
            num_running=0,
            num_waiting=stats.num_running + stats.num_waiting,
            num_seats_used=0,
            num_free_blocks=stats.num_blocks,
            kv_usage=0.0,
            is_up=False,
        )

    async def _take(self, outputs: EngineOutputs) -> None:
        if outputs.stats is not None:
            keep_rising(outputs.stats, self._stats)
            self._stats = outputs.stats
            if self.on_stats is not None:
                self.on_stats(outputs.stats)
        self._tell(*self._processor.add_special(outputs.special))
        ids, column = outputs.ids or [], outputs.column
        push = self._processor.push if outputs.counts is None else self._processor.push_parts
        for start in range(0, len(ids), OUTPUTS_A_TURN):
            if start:
                await asyncio.sleep(0)
            end = start + OUTPUTS_A_TURN
            self._tell(*push(ids[start:end], column[start:end]))

    def _tell(self, changed: Sequence[RequestState], aborts: Sequence[str]) -> None:
        """Wake the readers of what changed, and let the engine stop what has ended here."""
        if aborts:
            self._client.abort(aborts, "stop")
        for request_state in changed:
            if request_state.waiter is not None and request_state.has_news(self._interval):
                _wake(request_state)

    def _die(self, error: BaseException) -> None:
        if self._dead_error is None:
            self._dead_error = error
        self._up.set()
        for request_state in self._processor.running():
            _wake(request_state)

    def _raise_if_dead(self) -> None:
        if self._dead_error is not None:
            raise EngineDeadError(str(self._dead_error)) from self._dead_error

    # The engine

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def is_running(self) -> bool:
        return self._dead_error is None

    @property
    def is_stopped(self) -> bool:
        return self._dead_error is not None

    @property
    def model_config(self) -> ModelConfig:
        """As it was asked for."""
        return self.info.resolved.config.model

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model does as it runs: "generate", or tasks of PoolingParams."""
        pooler = self.info.resolved.pooler
        return ("generate",) if pooler is None else tuple(pooler.tasks)

    @property
    def errored(self) -> bool:
        return self._dead_error is not None

    @property
    def dead_error(self) -> BaseException | None:
        """Why the engine stopped; None while it runs."""
        return self._dead_error

    @property
    def chat_template(self) -> ChatTemplate | None:
        """For `chat.render`; None if the model has none."""
        return None if self._tokenizer is None else self._tokenizer.template

    @property
    def formats(self) -> Formats:
        """How the model writes calls and reasoning; for a `ReplyPlan`."""
        return self._formats

    async def check_health(self) -> None:
        """Nothing, if the engine runs.

        Raises:
            EngineDeadError: it has stopped.
        """
        self._raise_if_dead()

    @property
    def last_heard(self) -> float:
        """time.monotonic() of the core's latest message."""
        return self._client.last_heard

    def ping(self) -> None:
        """Ask the engine for a sign of life, without waiting: the answer moves `last_heard` on."""
        self._raise_if_dead()
        if self.outage is None:
            self._client.ping()

    def stats(self) -> EngineStats:
        """The core's counters and gauges as of its last report."""
        return self._stats

    async def refresh_stats(self) -> None:
        """Ask the core for its counters, instead of waiting for its next report."""
        stats = msgspec.convert(await self.call("stats"), EngineStats)
        keep_rising(stats, self._stats)
        self._stats = stats

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        """None if the engine works on token ids only."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults that the model's generation_config.json asks for."""
        return SamplingParams(**self.info.resolved.info.generation_defaults)

    async def look(self, after: float, seconds: float) -> list[EngineView]:
        """What goes on in each core that runs: steps that ended later than `after` (time.time()), requests, blocks. For
        `seconds` from now on they can be asked for lives (`life`), and requests that end are kept (`find`)."""
        self.keep_ended(seconds)
        return msgspec.convert(await self.call("look", after, seconds), list[EngineView])

    def keep_ended(self, seconds: float) -> None:
        """Requests of this process that end within these are kept for a while (`find`, `latest`)."""
        self._processor.ended.watch(seconds)

    async def life(self, request_id: str) -> list[LifeEvent]:
        """What the cores know of a request's life; empty if it was not followed."""
        return msgspec.convert(await self.call("life", request_id) or [], list[LifeEvent])

    def find(self, request_id: str) -> RequestState | None:
        """A request of this process that runs, or that has ended while somebody looked."""
        return self._processor.find(request_id)

    def latest(self) -> list[RequestState]:
        """Requests of this process that have ended while somebody looked, the last first."""
        return self._processor.ended.latest()

    async def call(self, method: str, *args: Any) -> Any:
        """A utility of the core: "stats", "reset_prefix_cache", "check" … It waits for one that is started again."""
        await self._up.wait()
        self._raise_if_dead()
        return await self._client.call_async(method, *args)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of each worker (there is one a rank).

        Args:
            method: its name ("memory"); a function cannot be sent to the engine's process.
            timeout: seconds to wait; None: as long as it takes.
            args: of the call.
            kwargs: of the call.

        Returns:
            The answers, plain data.

        Raises:
            InputError: `method` is a function.
            TimeoutError: there was no answer in time.
        """
        if not isinstance(method, str):
            raise InputError(
                "a function cannot be sent to the engine's process: name a method of the worker (memory, profile), or "
                "use LLM, whose worker is in its own process",
                "method",
            )
        if kwargs:
            raise InputError("methods by their names take args, and no kwargs", "kwargs")
        answers: list[Any] = await asyncio.wait_for(self.call("workers", method, *args), timeout)
        return answers

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what the worker does from now on (`profiler_config`).

        Args:
            profile_prefix: of the trace's file name.

        Raises:
            InputError: profiling is off, or on already.
        """
        await self.call("profile", "start", profile_prefix)

    async def stop_profile(self) -> str | None:
        """End the recording. Returns the path of the trace, None if another program has it."""
        path: str | None = await self.call("profile", "stop")
        return path

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached KV; with `reset_running_requests` running requests are computed anew."""
        return bool(await self.call("reset_prefix_cache", reset_running_requests))

    def shutdown(self) -> None:
        """End the engine; requests on their way end with EngineDeadError. Call it again as often as you like."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._die(EngineDeadError("the engine was shut down"))
        self._reader.cancel()
        self._client.shutdown()


def _wake(request_state: RequestState) -> None:
    """Let the reader of this request go on, if it waits."""
    waiter, request_state.waiter = request_state.waiter, None
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
