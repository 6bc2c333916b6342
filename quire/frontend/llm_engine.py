"""LLMEngine: an engine that its caller drives step by step. `LLM` is a user of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, Unpack

import msgspec

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.config.model import ModelConfig
from quire.config.resolve import resolve
from quire.config.typed_options import EngineOptions
from quire.engine.client import EngineClient, EngineInfo, start_here, start_process
from quire.foundation.errors import ConfigError, EngineDeadError, InputError
from quire.foundation.log import get_logger
from quire.frontend.adapters import AdapterNames, read_adapter
from quire.frontend.inputs import PromptLike, build, read_prompt
from quire.frontend.interrupts import INTERRUPT_SECONDS, deferred_interrupt
from quire.frontend.journal import log_death
from quire.frontend.names_elsewhere import NamesElsewhere
from quire.frontend.outputs import OutputProcessor, RequestState
from quire.frontend.pooling import requests as pooling
from quire.frontend.tokenization.tokenizer import Tokenizer, load_tokenizer
from quire.observe.engine_metrics import metrics_of
from quire.types.adapter import Adapter, LoRARequest
from quire.types.metrics import Metric
from quire.types.output import EngineStats, RequestOutput
from quire.types.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

_log = get_logger(__name__)
T = TypeVar("T")
Output = RequestOutput | PoolingRequestOutput[PoolingOutput]


class Added(NamedTuple):
    """A request of `add_request`."""

    request_state: RequestState
    pooling: tuple[str, PoolingParams] | None  # task and params


class LLMEngine(NamesElsewhere):
    """Requests are added, and each `step` gives the news of all of them. For one thread.

    engine = LLMEngine.from_engine_args(EngineArgs(model="Qwen/Qwen3-0.6B"))
    engine.add_request("first", "The capital of France is", SamplingParams())
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.outputs[0].text)
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None) -> None:
        """Take over a started engine."""
        self.client = client
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(tokenizer)
        self.adapters = AdapterNames()
        self._added: dict[str, Added] = {}
        self._news: dict[str, Added] = {}  # of the turns since the last step

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, enable_multiprocessing: bool = False) -> LLMEngine:
        """Start the engine that the args describe.

        Args:
            engine_args: all options.
            enable_multiprocessing: in a process of its own, not here.

        Raises:
            ConfigError: an option cannot work; it is named.
        """
        client = start_process if enable_multiprocessing else start_here
        return cls._start(engine_args.create_engine_config(), client)

    @classmethod
    def from_options(cls, model: str = "", **options: Unpack[EngineOptions]) -> LLMEngine:
        """Start an engine in this process.

        Raises:
            ConfigError: an option is unknown, or cannot work.
        """
        return cls._start(EngineConfig.from_python(model=model, **options), start_here)

    @classmethod
    def _start(cls, config: EngineConfig, client: Callable[..., EngineClient]) -> LLMEngine:
        resolved = resolve(config)
        tokenizer = load_tokenizer(resolved)
        return cls(client(resolved), tokenizer)

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue a request.

        Args:
            request_id: of a request that is not running.
            prompt: as `LLM.generate` takes it.
            params: `output_kind` says what its outputs hold: all so far, what is new, or the whole at the end.
            arrival_time: Unix seconds; None: now.
            priority: lower comes first, where the engine schedules by priority.
            lora_request: the adapter that it is answered with.

        Returns:
            Its id.

        Raises:
            InputError: the request cannot run, or the id is in use.
            EngineDeadError: the engine has stopped.
        """
        if request_id in self._added:
            raise InputError(f"request_id {request_id!r} is in use by a request that has not finished", "request_id")
        task: tuple[str, PoolingParams] | None = None
        adapter = self.adapter_of(lora_request)
        if isinstance(params, PoolingParams):
            task = pooling.check_task(params, self.info), params
            given = pooling.read(prompt, self.tokenizer)
            text = None
            request = pooling.build(
                given, params, task[0], self.info, request_id=request_id, priority=priority, adapter=adapter
            )
            requests = [request]
        else:
            read = read_prompt(prompt, takes_embeds=True)
            text = read.text
            requests = build(
                read, params, self.info, self.tokenizer, request_id=request_id, priority=priority, adapter=adapter,
                arrival=arrival_time,
            )  # fmt: skip
        self._added[request_id] = Added(self.processor.add(requests, request_id, text), task)
        try:
            for request in requests:
                self.submit(request)
        except BaseException:
            self.abort_request(request_id)
            raise
        return request_id

    def submit(self, request: EngineRequest) -> None:
        """Hand a request whose outputs `processor` expects to the engine.

        Raises:
            EngineDeadError: there is none any more.
        """
        self.processor.journal.send(self.client, request)

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """End requests: nothing more comes of them. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        running = list(itertools.chain.from_iterable(self.processor.abort(one)[1] for one in ids))
        for one in ids:
            self._added.pop(one, None)
            self._news.pop(one, None)
        try:
            self.client.abort(running)
        except EngineDeadError:
            pass  # nothing runs any more

    def step(self) -> list[Output]:
        """Wait for the engine's next step. Ctrl-C waits for the end of the step.

        Returns:
            The news of the requests added here, in the order in which they came; empty if there are no requests, or
            none has news yet.

        Raises:
            RefusedError: the engine does not take a pooling request.
            EngineDeadError: the engine has stopped.
        """
        if self._added and not self._news:
            with deferred_interrupt() as interrupted:
                self.turn()
                if interrupted():
                    raise KeyboardInterrupt
        outputs: list[Output] = []
        for request_id, added in list(self._news.items()):
            try:
                outputs.append(self._take(added))
            except pooling.RefusedError:
                if outputs:
                    break  # these first; it is told by the next step
                del self._news[request_id], self._added[request_id]
                raise
            del self._news[request_id]
            if outputs[-1].finished:
                del self._added[request_id]
        return outputs

    def turn(self) -> list[RequestState]:
        """Wait for outputs, a while; the requests, of whomever, that they are about.

        An engine whose worker is another process, or that is one itself, may die: its requests go on in the next.
        """
        try:
            changed, aborts = self.processor.process(self.client.poll(INTERRUPT_SECONDS))
        except EngineDeadError as error:
            changed, aborts = self._outlive(error)
        if aborts:
            self.client.abort(aborts, "stop")
        for request_state in changed:
            added = self._added.get(request_state.request_id)
            if added is not None and (request_state.finished or (added.pooling is None and request_state.has_news())):
                self._news[request_state.request_id] = added
        return changed

    def _outlive(self, error: EngineDeadError) -> tuple[list[RequestState], list[str]]:
        """The engine is dead: wait for the next and give it what is open. Raises `error`, or why there will be none."""
        death = self.client.death
        if death is None or not self.client.can_restart:
            raise error
        began, journal = time.monotonic(), self.processor.journal
        ends = journal.bury(death)
        log_death(death, len(journal) - len(ends))
        self.client.restart()
        ended = self.processor.add_special(ends)
        try:
            while entries := journal.unsent():
                journal.send_again(self.client, entries)
        except EngineDeadError:
            return ended  # `poll` says so again
        if not death.others:
            _log.warning("the engine is back after %.1f s; %d requests go on", time.monotonic() - began, len(journal))
        return ended

    def _take(self, added: Added) -> Output:
        if added.pooling is None:
            return added.request_state.take()
        task, params = added.pooling
        return pooling.output(added.request_state, task, params, self.info)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to wait for or to tell."""
        return bool(self._added)

    def get_num_unfinished_requests(self) -> int:
        return len(self._added)

    # Adapters

    def adapter_of(self, request: LoRARequest | None) -> Adapter | None:
        """The adapter that a request names, loaded if it was not.

        Raises:
            InputError: it cannot be used.
        """
        if request is None:
            return None
        adapter = self.adapters.find(request) if isinstance(request, LoRARequest) else None
        if adapter is None:
            adapter = read_adapter(request, self.info)
            try:
                self.client.call("load_adapter", *adapter.fields())
            except ConfigError as error:
                raise InputError(str(error), error.field) from None
            if (before := self.adapters.add(request, adapter)) is not None:
                self.client.call("drop_adapter", before.key)
        return adapter

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter ahead of its first request. Returns True.

        Raises:
            InputError: it cannot be used.
        """
        self.adapter_of(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. Requests that run with it go on. Returns whether it was known."""
        request = self.adapters.numbered(lora_id)
        if request is None:
            return False
        if (adapter := self.adapters.remove(request.lora_name)) is not None:
            self.client.call("drop_adapter", adapter.key)
        return True

    def list_loras(self) -> set[int]:
        """The ids of the adapters that are known."""
        return {request.lora_int_id for request in self.adapters}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in the host's memory, whatever others are used. Returns whether it is there.

        Raises:
            InputError: no room would be left for others.
        """
        request = self.adapters.numbered(lora_id)
        known = None if request is None else self.adapters.named(request.lora_name)
        return known is not None and bool(self.client.call("pin_adapter", known[1].key))

    # The engine

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    @property
    def model_config(self) -> ModelConfig:
        """As it was asked for."""
        return self.info.resolved.config.model

    def get_tokenizer(self) -> Tokenizer | None:
        """None if the engine works on token ids only."""
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """The engine's counters and gauges of now, by the names that /metrics has for them."""
        labels = {"model_name": self.model_config.names[0]}
        return metrics_of(msgspec.convert(self.client.call("stats"), EngineStats), labels)

    def collective_rpc(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of each worker (there is one a rank) by its name, or a function of it.

        Args:
            method: one of the worker's methods ("memory"), or a function, which gets the worker and the arguments.
            timeout: seconds to wait for another process; None: as long as it takes.
            args: of the call.
            kwargs: of the call.

        Returns:
            The answers: of a method plain data, of a function anything.

        Raises:
            InputError: a function cannot be sent to another process.
            TimeoutError: there was no answer in time.
        """
        if callable(method):
            function, named = method, dict(kwargs or {})
            return [self.client.run_in_worker(lambda worker: function(worker, *args, **named))]
        if kwargs:
            raise InputError("methods by their names take args, and kwargs are for functions", "kwargs")
        answers: list[Any] = self.client.call("workers", method, *args, timeout=timeout)
        return answers

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """What `func` makes of the model, a torch module, in each worker.

        Raises:
            InputError: the worker is in another process.
        """
        return [self.client.run_in_worker(lambda worker: func(worker.model))]

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what the worker does from now on (`profiler_config`).

        Args:
            profile_prefix: of the trace's file name.

        Raises:
            InputError: profiling is off, or on already.
        """
        self.client.call("profile", "start", profile_prefix)

    def stop_profile(self) -> str | None:
        """End the recording. Returns the path of the trace, None if another program has it."""
        path: str | None = self.client.call("profile", "stop")
        return path

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached KV; with `reset_running_requests` running requests are computed anew."""
        return bool(self.client.call("reset_prefix_cache", reset_running_requests))

    def shutdown(self) -> None:
        """End the engine and free the device."""
        self.client.shutdown()
