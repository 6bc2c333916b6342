"""LLM: offline generation. A thin user of the front end, with the engine in this process."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any, TypeVar, Unpack, cast

from msgspec.structs import force_setattr

from quire.config.engine_args import EngineArgs
from quire.config.model import ModelConfig
from quire.config.typed_options import EngineOptions
from quire.engine.client import EngineClient, EngineInfo
from quire.foundation.errors import InputError
from quire.foundation.heap import few_whole_collections, no_collection
from quire.frontend.beam_search import BeamSearch, alternatives
from quire.frontend.inputs import Prompt, PromptLike, as_list, build, read_prompt, tokenize
from quire.frontend.interrupts import deferred_interrupt
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.names_elsewhere import NamesElsewhere
from quire.frontend.outputs import RequestState
from quire.frontend.pooling.api import Adapted, PoolingAPI
from quire.frontend.progress import ProgressFactory, PromptProgress
from quire.frontend.replies import Reply, ReplyPlan, ReplyWish
from quire.frontend.reply_formats import Formats, find_formats
from quire.frontend.structured import grammar_of
from quire.frontend.templates.chat import ChatTemplate, Message, continued_text, render
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.frontend.tokenization.truncation import (
    AS_USUAL,
    Side,
    TokenizationOptions,
    Truncation,
    check_least_tokens,
    encode_texts,
)
from quire.frontend.tools import read_tool_choice, read_tools
from quire.types.adapter import Adapter, LoRARequest
from quire.types.metrics import Metric
from quire.types.output import BeamSearchOutput, CompletionOutput, RequestOutput
from quire.types.request import EngineRequest, TokenIds, token_list
from quire.types.sampling import BeamSearchParams, RequestOutputKind, SamplingParams

Params = SamplingParams | Sequence[SamplingParams]
T = TypeVar("T")


class LLM(PoolingAPI, NamesElsewhere):
    """A model ready to generate, or to embed, classify and score.

        llm = LLM("Qwen/Qwen3-0.6B", max_model_len=4096)
        print(llm.generate("The capital of France is")[0].outputs[0].text)

    `model` is a local folder or a Hugging Face id; without it the demo model runs. `options` are those of the
    reference, named and typed by `EngineOptions`; `logits_processors` may hold classes as well as names. Raises
    ConfigError for an option that is unknown or cannot work.

    Calls from several threads wait for each other: give prompts together, or use AsyncLLM, for them to run together.
    `llm_engine` is the engine step by step, for one thread: requests added there run along with those of `generate`.
    """

    def __init__(self, model: str = "", **options: Unpack[EngineOptions]) -> None:
        self._start(LLMEngine.from_options(model, **options))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Start the engine that the args describe.

        Raises:
            ConfigError: an option is unknown, or cannot work.
        """
        return cls._around(LLMEngine.from_engine_args(engine_args))

    @classmethod
    def from_client(cls, client: EngineClient, tokenizer: Tokenizer | None) -> LLM:
        """Take over an engine that has been started otherwise."""
        return cls._around(LLMEngine(client, tokenizer))

    @classmethod
    def _around(cls, engine: LLMEngine) -> LLM:
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self._tokenizer, self._client, self._processor = engine.tokenizer, engine.client, engine.processor
        self._request_numbers = itertools.count()
        self._turns = threading.RLock()  # held by the thread that drives the engine
        self._enqueued: list[tuple[RequestState, LoRARequest | None]] = []

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: Adapted = None,
        priority: int | Sequence[int] | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts.

        Args:
            prompts: text, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids} or {"prompt_embeds": tensor}
                (with `enable_prompt_embeds`), or a list of such.
            sampling_params: one for all prompts, or a list with one for each; None: the model's defaults.
                `max_tokens` is cut to what the context leaves beside the prompt; such an answer ends with "length".
            use_tqdm: show progress.
            lora_request: the adapter that all prompts are answered with, or a list with one, or None, for each.
            priority: one for all, or a list; lower comes first, where the engine schedules by priority.
            truncate_prompt_tokens: longer prompts are cut to this; -1: to what the context leaves beside `max_tokens`.
            truncation_side: where they are cut: "left" (at their beginning), or "right".
            tokenization_kwargs: the two above, and add_special_tokens, under the name that other engines have for them.

        Returns:
            The outputs, in the order of the prompts.

        Raises:
            InputError: a prompt or its parameters cannot run. Nothing has run then.
            EngineDeadError: the engine has stopped.
            KeyboardInterrupt: Ctrl-C; all prompts are aborted, and the engine stays usable.

        Shapes:
            prompt_embeds: [tokens, hidden size].
        """
        with no_collection():
            given = [read_prompt(prompt, takes_embeds=True) for prompt in as_list(prompts)]
        options = TokenizationOptions.of(tokenization_kwargs, truncate_prompt_tokens, truncation_side)
        return self._run(given, sampling_params, priority, use_tqdm, options, lora_request, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        use_tqdm: bool | ProgressFactory = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        max_thinking_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapted = None,
        priority: int | Sequence[int] | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them.

        Args:
            messages: a list of {"role": …, "content": …}, or a list of such lists.
            sampling_params: as `generate` takes them. What its `structured_outputs` asks binds the content alone.
            use_tqdm: show progress.
            chat_template: another template than the model's, or the name of one of its templates.
            add_generation_prompt: end the prompt where the assistant's turn begins.
            continue_final_message: let the answer go on with the last message.
            tools: functions the model may call, as OpenAI's clients write them.
            tool_choice: "auto", "none", "required" or a named function; the last two bind the answer to calls.
            parallel_tool_calls: False: one call at most.
            max_thinking_tokens: tokens of reasoning, after which it is ended.
            chat_template_kwargs: variables of the template.
            lora_request: as `generate` takes it.
            priority: as `generate` takes it.
            truncate_prompt_tokens: likewise.
            truncation_side: likewise.
            tokenization_kwargs: likewise.

        Returns:
            The outputs, in order. Each answer has its `text`, and its parts: `reasoning`, `content`, `tool_calls`.

        Raises:
            InputError: as `generate`, or the template refuses the messages.
            EngineDeadError: the engine has stopped.
        """
        chats = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        tokenizer = self.get_tokenizer()
        template = tokenizer.template
        if chat_template is not None:
            template = ChatTemplate(chat_template, tokenizer.special_tokens)
        given = read_tools(tools or [])
        choice = read_tool_choice(tool_choice, given)
        kwargs = {**self.info.resolved.config.replies.default_chat_template_kwargs, **(chat_template_kwargs or {})}
        options = (tools, template, add_generation_prompt, continue_final_message, kwargs)
        asked = self.get_default_sampling_params() if sampling_params is None else sampling_params
        prompts, plans, params = [], [], []
        for chat, wanted in zip(chats, _one_each(asked, chats, "sampling_params"), strict=True):
            messages = cast(Sequence[Message], chat)
            text = render(messages, *options)
            final = _final_only(wanted)
            structured = final.structured_outputs
            wish = ReplyWish(
                tools=given,
                tool_choice=choice,
                parallel_tool_calls=parallel_tool_calls,
                max_thinking_tokens=max_thinking_tokens,
                grammar=None if structured is None else grammar_of(structured),
                close_at_limit=structured is not None and structured.close_at_limit,
            )
            continued = continued_text(messages) if continue_final_message else None
            plans.append(ReplyPlan(self._formats, wish, text, kwargs, continued=continued))
            prompts.append(Prompt(text=text, constraint=plans[-1].constraint))
            params.append(plans[-1].params(final))
        cut = TokenizationOptions.of(tokenization_kwargs, truncate_prompt_tokens, truncation_side)
        outputs = self._run(prompts, params, priority, use_tqdm, cut, lora_request, add_special_tokens=False)
        for output, plan in zip(outputs, plans, strict=True):
            for answer in output.outputs:
                _split(answer, plan)
        return outputs

    def enqueue(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params | None = None,
        lora_request: Adapted = None,
        priority: int | Sequence[int] | None = None,
        *,
        use_tqdm: bool | ProgressFactory = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts, to be answered together with others: `wait_for_completion` has them run.

        Args:
            prompts: as `generate` takes them, like all others.
            sampling_params: likewise.
            lora_request: likewise.
            priority: likewise.
            use_tqdm: has no effect; progress is shown where it is waited for.
            tokenization_kwargs: as `generate` takes it.

        Returns:
            The ids of their requests, in order.

        Raises:
            InputError: a prompt or its parameters cannot run. None is queued then.
            EngineDeadError: the engine has stopped.
        """
        del use_tqdm
        given = [read_prompt(prompt, takes_embeds=True) for prompt in as_list(prompts)]
        options = TokenizationOptions.of(tokenization_kwargs, None, None)
        special = options.special(True)
        requests = self._build(given, sampling_params, priority, options, lora_request, add_special_tokens=special)
        with self._turns:
            request_states = self._submit(requests, [prompt.text for prompt in given])
            self._enqueued += zip(request_states, _one_each(lora_request, given, "lora_request"), strict=True)
        return list(requests)

    def wait_for_completion(
        self, output_type: type[Any] | None = None, *, use_tqdm: bool | ProgressFactory = True
    ) -> list[RequestOutput]:
        """The answers to all that was queued by `enqueue` since the last call.

        Args:
            output_type: of the outputs, which are RequestOutput.
            use_tqdm: show progress.

        Returns:
            The outputs, in the order in which they were queued.

        Raises:
            InputError: another type of outputs is wanted.
            EngineDeadError: the engine has stopped.
            KeyboardInterrupt: Ctrl-C; what was queued is aborted, and the engine stays usable.
        """
        if output_type not in (None, RequestOutput):
            raise InputError("enqueue queues prompts to be answered: output_type is RequestOutput", "output_type")
        with self._turns:
            enqueued, self._enqueued = self._enqueued, []
            request_states = [request_state for request_state, _ in enqueued]
            with PromptProgress(len(enqueued), use_tqdm) as progress, deferred_interrupt() as interrupted:
                self._finish_all(request_states, progress, interrupted)
        outputs = [request_state.take() for request_state in request_states]
        for output, (_, adapted) in zip(outputs, enqueued, strict=True):
            output.lora_request = adapted
        return outputs

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        lora_request: Adapted = None,
        use_tqdm: bool | ProgressFactory = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search the best answers of each prompt; see `BeamSearch`.

        Args:
            prompts: text or token ids.
            params: width and length of the search.
            lora_request: as `generate` takes it.
            use_tqdm: show progress.
            concurrency_limit: prompts at a time; None: all.

        Returns:
            For each prompt its `beam_width` best answers, best first.

        Raises:
            InputError: a prompt or the parameters cannot run.
        """
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InputError(f"concurrency_limit must be >= 1, got {concurrency_limit}", "concurrency_limit")
        given = [read_prompt(prompt) for prompt in as_list(prompts)]
        prompts = as_list(prompts)
        ids = self._tokenize(given, add_special_tokens=True)
        searches = [
            BeamSearch(token_list(tokens), params, self.info, self._tokenizer, prompt.text)
            for prompt, tokens in zip(given, ids, strict=True)
        ]
        adapted = dict(zip(map(id, searches), _one_each(lora_request, prompts, "lora_request"), strict=True))
        with PromptProgress(params.max_tokens, use_tqdm, "Beam search steps") as progress:
            while running := [search for search in searches if not search.is_done][:concurrency_limit]:
                beams = [Prompt(token_ids=beam.tokens) for search in running for beam in search.running]
                ask = [search.ask for search in running for _ in search.running]
                wanted = [adapted[id(search)] for search in running for _ in search.running]
                requests = self._build(beams, ask, None, AS_USUAL, wanted, add_special_tokens=False)
                done = iter(self._run_requests(requests, [None] * len(beams), False))
                for search in running:
                    count = search.ask.logprobs or 1
                    search.take([alternatives(next(done), count) for _ in search.running])
                progress.done(0, len(beams))
        return [search.result(self._tokenizer) for search in searches]

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Params | None,
        priority: int | Sequence[int] | None,
        use_tqdm: bool | ProgressFactory,
        options: TokenizationOptions = AS_USUAL,
        lora_request: Adapted = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        with no_collection():
            special = options.special(add_special_tokens)
            requests = self._build(prompts, params, priority, options, lora_request, add_special_tokens=special)
        with few_whole_collections():
            request_states = self._run_requests(requests, [prompt.text for prompt in prompts], use_tqdm)
            outputs = [request_state.take() for request_state in request_states]
        for output, adapted in zip(outputs, _one_each(lora_request, prompts, "lora_request"), strict=True):
            output.lora_request = adapted
        return outputs

    def _run_requests(
        self, requests: Mapping[str, list[EngineRequest]], texts: Sequence[str | None], use_tqdm: bool | ProgressFactory
    ) -> list[RequestState]:
        """requests: those of each prompt by the prompt's number, texts: of the prompts. All have finished then."""
        with (
            self._turns,
            PromptProgress(len(requests), use_tqdm) as progress,
            deferred_interrupt() as interrupted,
        ):
            request_states = self._submit(requests, texts)
            self._finish_all(request_states, progress, interrupted)
        return request_states

    def _submit(self, requests: Mapping[str, list[EngineRequest]], texts: Sequence[str | None]) -> list[RequestState]:
        request_states = [
            self._processor.add(children, number, text)
            for (number, children), text in zip(requests.items(), texts, strict=True)
        ]
        try:
            for request in itertools.chain.from_iterable(requests.values()):
                self.llm_engine.submit(request)
        except BaseException:
            self._abort(request_states)
            raise
        return request_states

    def _adapters(self, lora_request: Adapted, prompts: Sequence[Any]) -> list[Adapter | None]:
        """Of each prompt, loaded if they were not."""
        with self._turns:
            return [self.llm_engine.adapter_of(one) for one in _one_each(lora_request, prompts, "lora_request")]

    def _new_number(self) -> str:
        return str(next(self._request_numbers))

    def _build(
        self,
        prompts: Sequence[Prompt],
        params: Params | None,
        priority: int | Sequence[int] | None,
        options: TokenizationOptions,
        lora_request: Adapted = None,
        *,
        add_special_tokens: bool,
    ) -> dict[str, list[EngineRequest]]:
        """The requests of each prompt (n of them), by the prompt's number, in order."""
        chosen = _one_each(self.get_default_sampling_params() if params is None else params, prompts, "sampling_params")
        final = {id(p): _final_only(p) for p in chosen}
        priorities = _one_each(0 if priority is None else priority, prompts, "priority")
        adapters = self._adapters(lora_request, prompts)
        is_cut = options.truncate_prompt_tokens is not None
        token_ids = self._tokenize(prompts, add_special_tokens=add_special_tokens, is_cut=is_cut)
        requests: dict[str, list[EngineRequest]] = {}
        for prompt, ids, asked, rank, adapter in zip(prompts, token_ids, chosen, priorities, adapters, strict=True):
            number = self._new_number()
            if options.truncate_prompt_tokens is not None:
                ids = self._cut_prompt(prompt, ids, asked, options, add_special_tokens=add_special_tokens)
            known = replace(prompt, token_ids=ids)
            requests[number] = build(
                known, final[id(asked)], self.info, self._tokenizer, request_id=number, priority=rank, adapter=adapter
            )
        return requests

    def _finish_all(
        self, request_states: Sequence[RequestState], progress: PromptProgress, interrupted: Callable[[], bool]
    ) -> None:
        """Until all have finished. What was queued may have done so beside others."""
        left = {request_state.request_id for request_state in request_states}
        try:
            news = request_states
            while True:
                for request_state in news:
                    if request_state.finished and request_state.request_id in left:
                        left.remove(request_state.request_id)
                        progress.done(request_state.num_prompt_tokens, request_state.num_output_tokens)
                if interrupted():
                    raise KeyboardInterrupt
                if not left:
                    return
                news = self.llm_engine.turn()
        except BaseException:
            self._abort(request_states)
            raise

    def _abort(self, request_states: Sequence[RequestState]) -> None:
        self.llm_engine.abort_request([request_state.request_id for request_state in request_states])

    def _tokenize(self, prompts: Sequence[Prompt], *, add_special_tokens: bool, is_cut: bool = False) -> list[TokenIds]:
        """The ids of all prompts; texts are tokenized in one go, on all cores.

        Raises ContextLengthError before that for one that its length proves too long, unless it will be cut.
        """
        texts = [prompt.text or "" for prompt in prompts if prompt.token_ids is None]
        ids: Iterator[list[int]] = iter(())
        if texts and self._tokenizer is not None:
            context = self.info.max_model_len
            if not is_cut:
                check_least_tokens(self._tokenizer, texts, context, context - 1)
            ids = iter(self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens))
            prompts = [p if p.token_ids is not None else Prompt(p.text, next(ids)) for p in prompts]
        return [tokenize(prompt, self._tokenizer) for prompt in prompts]

    def _cut_prompt(
        self,
        prompt: Prompt,
        ids: TokenIds,
        params: SamplingParams,
        options: TokenizationOptions,
        *,
        add_special_tokens: bool,
    ) -> TokenIds:
        if prompt.embeds is not None:
            raise InputError("prompt_embeds are not cut: give fewer rows", "truncate_prompt_tokens")
        wanted, side = options.truncate_prompt_tokens, options.truncation_side
        cut = Truncation.of_answered(wanted, side, self.info, params.max_tokens, params.min_tokens)
        if prompt.token_ids is not None or self._tokenizer is None:
            return cut.cut(ids)
        if cut.limit is None or len(ids) <= cut.limit:
            return ids
        return encode_texts(self._tokenizer, [prompt.text or ""], cut, add_special_tokens=add_special_tokens)[0]

    @cached_property
    def _formats(self) -> Formats:
        """How the model writes calls and reasoning."""
        return find_formats(self.info.resolved, self._tokenizer)

    # The engine

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model.

        Raises:
            InputError: the engine runs without one.
        """
        if self._tokenizer is None:
            raise InputError("this engine works on token ids only (skip_tokenizer_init)", "prompt")
        return self._tokenizer

    def get_world_size(self, include_dp: bool = True) -> int:
        """Devices that compute.

        Args:
            include_dp: those of all engine cores, not of one.
        """
        runtime = self.info.resolved.config.runtime
        return runtime.num_ranks * (runtime.data_parallel_size if include_dp else 1)

    @property
    def model_config(self) -> ModelConfig:
        """As it was asked for."""
        return self.llm_engine.model_config

    @property
    def runner_type(self) -> str:
        """ "generate" or "pooling"."""
        return "generate" if self.info.resolved.pooler is None else "pooling"

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the model does as it runs: "generate", or tasks of PoolingParams."""
        pooler = self.info.resolved.pooler
        return ("generate",) if pooler is None else tuple(pooler.tasks)

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults that the model's generation_config.json asks for."""
        return SamplingParams(**self.info.resolved.info.generation_defaults)

    def get_metrics(self) -> list[Metric]:
        """The engine's counters and gauges of now, by the names that /metrics has for them."""
        with self._turns:
            return self.llm_engine.get_metrics()

    def call(self, method: str, *args: Any) -> Any:
        """A utility of the core: "stats", "reset_prefix_cache", "check" …"""
        with self._turns:
            return self._client.call(method, *args)

    def collective_rpc(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """What each worker answers; see `LLMEngine.collective_rpc`."""
        with self._turns:
            return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """What `func` makes of the model (a torch module) in each worker; see `LLMEngine.apply_model`."""
        with self._turns:
            return self.llm_engine.apply_model(func)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what the worker does; see `LLMEngine.start_profile`."""
        with self._turns:
            self.llm_engine.start_profile(profile_prefix)

    def stop_profile(self) -> str | None:
        """End the recording. Returns the path of the trace, None if another program has it."""
        with self._turns:
            return self.llm_engine.stop_profile()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached KV; what is running in `llm_engine` is computed anew if asked."""
        with self._turns:
            return self.llm_engine.reset_prefix_cache(reset_running_requests)

    def shutdown(self) -> None:
        """Free the device. The object cannot be used afterwards."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _split(answer: CompletionOutput, plan: ReplyPlan) -> None:
    """Tell the parts of an answer's text."""
    parser = plan.parser()
    reply = Reply().add([*parser.feed(answer.text), *parser.finish(is_cut=answer.is_cut)])
    answer.content, answer.reasoning, answer.tool_calls = reply.content, reply.reasoning or None, reply.tool_calls
    answer.finish_reason = parser.finish_reason(answer.finish_reason)


def _one_each(value: T | Sequence[T], prompts: Sequence[Any], name: str) -> Sequence[T]:
    if not isinstance(value, Sequence):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise InputError(f"{name} has {len(value)} entries for {len(prompts)} prompts", name)
    return value


def _final_only(params: SamplingParams) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise InputError(f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params")
    final = copy.copy(params)  # has been checked
    force_setattr(final, "output_kind", RequestOutputKind.FINAL_ONLY)
    return final
