"""Device up, load, measure, allocate, capture; then plans."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from quire.config.parallel.contexts import check_layers
from quire.config.parallel.expert_balance import ExpertBalance
from quire.config.profiler import ProfilerConfig
from quire.config.resolve import Resolved
from quire.distributed.group import Group
from quire.foundation.errors import ConfigError, InputError
from quire.foundation.log import get_logger
from quire.foundation.wake_gpu import wait_until_awake
from quire.kernels.dispatch import plain_torch
from quire.layers.experts import Experts
from quire.models import catalog, kv_scales, weights
from quire.models.base import Decoder, keep_states_in
from quire.models.pooling import PoolingModel
from quire.platforms import select_platform
from quire.quantization.base import QuantizationMethod
from quire.quantization.select import make_method
from quire.types.kv import WorkerReport
from quire.types.plan import StepPlan, TokenMasks
from quire.types.ranks import ALONE, Rank
from quire.worker.adapters import Adapters
from quire.worker.assembly import DTYPES, Assembly
from quire.worker.batch import SIZE_STEP, round_size
from quire.worker.masked_step import MaskedStep
from quire.worker.memory import Memory, size_cache
from quire.worker.pages import Pages, lay_out
from quire.worker.phases import Phases
from quire.worker.pooling_runner import PoolingRunner
from quire.worker.profiler import Profiler
from quire.worker.readback import StepHandle
from quire.worker.runner import Runner
from quire.worker.sampling.custom import make_processors
from quire.worker.sampling.plugins import ProcessorSetup
from quire.worker.streams import Streams, idle_streams
from quire.worker.trial_steps import ALL_FEATURES, embeddings, prompt_chunks, prompts_to_pool, run_picky, spread
from quire.worker.workspaces import clear_workspaces

if TYPE_CHECKING:
    from quire.kernels.triton.rehearsal import Rehearsal

_log = get_logger(__name__)
_REHEARSED_TOKENS = 4096  # enough to be many, for every kernel
_REHEARSED_CHUNK = 8192  # of one row: enough that attention of few heads has large tiles
# A CPU reads so small a model within a millisecond on one core: more threads would mostly wait for each other, and wait
# very long as soon as another process wants their core.
_SMALL_MODEL = 64 * 1024**2
_kept: defaultdict[torch.device, int] = defaultdict(int)  # bytes; see Memory


class Worker:
    """One device's muscle. Knows plans and arrays, nothing of requests, text or time."""

    def __init__(self, resolved: Resolved, rank: Rank = ALONE) -> None:
        self._resolved = resolved
        self._rank = rank
        self._group: Group | None = None  # None: this is the only one
        self._platform = select_platform(resolved.device)
        self._phases = Phases(rank)
        self._max_model_len = resolved.max_model_len  # less once it is known what fits
        self.runner: Runner | PoolingRunner | None = None
        self._counted = 0  # bytes of `_kept` that are this engine's
        self._unprepared: list[int] = []  # sizes of steps whose products the library has not loaded yet, falling
        self._adapters: Adapters | None = None
        self._awaiting: MaskedStep | None = None  # the latest step, if it waits for its masks
        self._streams: Streams | None = None
        self._threads_before: int | None = None  # torch's threads are the whole process's: they are given back

    # -- start --------------------------------------------------------------------------------------------------

    def start(self) -> WorkerReport:
        """Bring the model up. Raises ConfigError (and kin) if it cannot run here, and holds nothing then."""
        try:
            with plain_torch(self._platform.plain_torch):
                return self._start()
        except BaseException as error:
            if self._is_lost():
                raise  # nothing can be given back: what is freed there would end the process before the error is read
            _forget_frames(error)
            self._group = None  # taking leave would wait for the others
            self.shutdown()
            raise

    def _is_lost(self) -> bool:
        """Whether the device does nothing more in this process, as after an access to memory that is not there."""
        device = getattr(self, "_device", None)
        if device is None or device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return True
        return False

    def _start(self) -> WorkerReport:
        resolved, config, info = self._resolved, self._resolved.config, self._resolved.info
        self._streams, rehearsal = self._set_up(), self._new_rehearsal()
        with self._phases.at("build"):
            self._model = model = self._build_model()
        if self._device.type == "cpu" and not config.runtime.num_threads and model.num_bytes() < _SMALL_MODEL:
            torch.set_num_threads(1)
        profiling = ProfilerConfig.read(config.observe.profiler_config)
        self._profiler = None if profiling is None else Profiler(profiling, self._device, self._mark)
        pages = self._lay_out(config.cache.block_size)
        if config.lora.enable_lora:
            self._adapters = Adapters(config.lora, model, DTYPES[resolved.dtype], self._device)
        assembly = Assembly(resolved, model, pages, self._device, self._streams, self._group, self._adapters)
        assembly.share_memory()
        setup = ProcessorSetup(info.vocab_size, self._device, Path(info.path))
        processors = make_processors(config.model.logits_processors if self._rank.samples else [], setup)
        with self._phases.at("rehearse"):
            rehearsal = self._rehearse(assembly, rehearsal)
        with self._phases.at("weights"):
            self._load_weights()
            if self._is_foreign:  # which its weights alone describe
                rehearsal = self._rehearse(assembly, self._new_rehearsal())
        with self._phases.at("compile"):
            _wait_for(rehearsal)
        with self._phases.at("profile"):
            memory = self._measure(assembly)
        size = size_cache(resolved, pages, memory)
        if self._group is not None:
            size = size.at_most(*self._group.smallest(size.num_blocks, size.max_model_len))
        self._max_model_len = size.max_model_len
        with self._phases.at("kv_cache"):
            self.runner = assembly.runner(size.num_blocks, size.max_model_len, processors=processors)
        with self._phases.at("graphs"):
            if not self._capture():
                self.runner = None  # whose cache must be gone before there is another
                self.runner = assembly.runner(
                    size.num_blocks, size.max_model_len, with_graphs=False, processors=processors
                )
        if self._platform.runs_ahead and isinstance(self.runner, Runner):
            self._unprepared = list(range(round_size(resolved.max_num_batched_tokens), 0, -SIZE_STEP))
        return WorkerReport(
            device=self._platform.device_name(),
            num_blocks=size.num_blocks,
            max_model_len=size.max_model_len,
            groups=pages.groups,
            vocab_size=info.vocab_size,
            weight_bytes=memory.weights,
            kv_bytes=size.num_blocks * pages.page_bytes,
            free_bytes=self._platform.free_bytes(),
            attention_backend=assembly.backend_name,
            phases=self._phases.seconds,
            mixed_sizes=self.runner.mixed_sizes if isinstance(self.runner, Runner) else [],
            prompt_cost=assembly.prompt_cost(),
            model_work=assembly.model_work(self._platform.device_name()),
            draft_costs=self.runner.draft_costs() if isinstance(self.runner, Runner) else [],
            max_drafted_rows=self.runner.max_drafted_rows if isinstance(self.runner, Runner) else 0,
            can_prepare=bool(self._unprepared),
            max_num_batched_tokens=assembly.max_tokens,
            notes=[note for note in (size.note, self._uncached(pages)) if note],
        )

    def _lay_out(self, block_size: int) -> Pages:
        """Raises ConfigError for drafts, or copies that share prompts, of a model that cannot have them."""
        keep_states_in(self._model, DTYPES[self._resolved.config.cache.state_dtype])
        pages = lay_out(self._model.kv_groups(block_size, DTYPES[self._resolved.kv_dtype]), block_size)
        check_layers(self._resolved.config.runtime, self._resolved.info, pages.groups)
        if self._resolved.speculative is not None and pages.states_a_page:
            raise ConfigError(
                f"speculative_config: {self._resolved.info.architecture} keeps a state, which cannot go back behind a "
                "draft that was wrong",
                "speculative_config",
            )
        return pages

    def _uncached(self, pages: Pages) -> str:
        """What the log says where the prefix cache is off for the model's sake, and nobody has said anything."""
        if not pages.states_a_page or self._resolved.config.cache.enable_prefix_caching is not None:
            return ""
        size = next(group.pages for group in pages.groups if group.pages) * pages.page_bytes / 1024**2
        return (
            f"enable_prefix_caching=False: the model's layers keep a state, of which a copy takes {size:.1f} MiB; "
            "--enable-prefix-caching turns it on"
        )

    def _capture(self) -> bool:
        """Whether steps are in graphs, if they may be; only of somebody else's code it is not known before."""
        try:
            if isinstance(self.runner, Runner):
                self.runner.capture(all_sizes=self._is_foreign)
        except RuntimeError as error:
            if not self._is_foreign:
                raise
            _log.warning("steps are launched from Python, as they cannot be captured in graphs: %s", error)
            return False
        finally:
            self._count_kept()
        return True

    def _count_kept(self) -> None:
        """Take down what the driver has come to keep of this engine's graphs."""
        if isinstance(self.runner, Runner):
            kept = max(self._counted, self.runner.driver_bytes)
            _kept[self._device] += kept - self._counted
            self._counted = kept

    @property
    def _is_foreign(self) -> bool:
        return isinstance(self._model, Decoder) and self._model.is_foreign

    def _load_weights(self) -> None:
        given, path = self._resolved.config.model, Path(self._resolved.info.path)
        progress = given.use_tqdm_on_load and self._rank.samples
        kind = given.load_format
        if self._resolved.info.is_mistral and kind in ("auto", "safetensors"):
            kind = "mistral"
        weights.load(self._model, path, kind, progress, given.seed, self._method.unused, self._method.renamed)
        if DTYPES[self._resolved.kv_dtype].itemsize == 1:
            self._take_in_scales(path, kind)
        if isinstance(self._model, Decoder):
            self._model.check()

    def _take_in_scales(self, path: Path, kind: str) -> None:
        """Of keys and values, from the checkpoint. Raises ConfigError where adapters would come after them."""
        layers = kv_scales.take_in(self._model, path, kind)
        if layers and self._adapters is not None:
            raise ConfigError(
                "the checkpoint has scales of keys and values, which adapters do not know: set kv_cache_dtype=auto",
                "kv_cache_dtype",
            )
        if layers and self._rank.samples:
            _log.info("KV cache: scales of %d layers are the checkpoint's, as powers of two", layers)

    def _set_up(self) -> Streams:
        """The device, and the other ranks if there are any."""
        with self._phases.at("device"):
            self._threads_before = torch.get_num_threads()
            self._device = self._platform.set_up(self._resolved.config.runtime.num_threads, self._rank)
            streams = Streams(self._device, runs_ahead=self._platform.runs_ahead)
            self._free_at_start = self._platform.free_bytes()
        with self._phases.at("ranks"):
            self._group = self._meet() if self._rank.size > 1 else None
        return streams

    def _meet(self) -> Group:
        runtime = self._resolved.config.runtime
        redundant = ExpertBalance.read(runtime).num_redundant_experts
        whole = runtime.enable_expert_parallel
        return Group(self._rank, self._device, whole_experts=whole, redundant_experts=redundant)

    @property
    def _mark(self) -> str:
        return f"-rank{self._rank.index}" if self._rank.size > 1 else ""

    def _build_model(self) -> Decoder | PoolingModel:
        resolved, group = self._resolved, self._group if self._rank.width > 1 else None
        dtype, positions = DTYPES[resolved.dtype], resolved.max_model_len
        method = self._method = self._quantization(dtype)
        if resolved.pooler is None:
            layers = resolved.config.runtime.pipeline_parallel_layers
            place = catalog.Place(self._rank.stage, self._rank.stages, layers)
            return catalog.build(resolved.info, dtype, self._device, positions, method, group, place)
        return catalog.build_for_pooling(resolved.info, resolved.pooler, dtype, self._device, positions, method, group)

    def _quantization(self, dtype: torch.dtype) -> QuantizationMethod:
        """Raises ConfigError if the device cannot multiply such weights."""
        name, checkpoint = self._resolved.quantization, self._resolved.info.quantization
        method = make_method(name, checkpoint)
        if (why := method.refuses(self._device, dtype)) is not None:
            raise ConfigError(f"quantization={name}: {why}", "quantization")
        return method

    def _new_rehearsal(self) -> Rehearsal | None:
        """None if kernels are none of ours, or cannot be compiled ahead."""
        if self._device.type != "cuda" or self._platform.plain_torch:
            return None
        from quire.kernels.triton.rehearsal import Rehearsal, is_possible

        wait_until_awake()
        return Rehearsal() if is_possible() else None

    def _rehearse(self, assembly: Assembly, rehearsal: Rehearsal | None) -> Rehearsal | None:
        """Go through every kind of step, numbers aside, so that kernels get compiled; None if that cannot be."""
        if rehearsal is None or (isinstance(self._model, Decoder) and not self._model.may_be_rehearsed):
            return None
        rows = self._resolved.max_num_seqs
        tokens = max(rows, min(self._resolved.max_num_batched_tokens, _REHEARSED_TOKENS))
        runner = self._trial_runner(assembly)
        try:
            with rehearsal:  # what takes long to compile comes early
                self._try(runner, tokens)
                if isinstance(runner, Runner):
                    # What is sampled here is garbage, so nothing may be looked up by it.
                    params = msgspec.structs.replace(ALL_FEATURES, logprobs=None)
                    run_picky(runner, params, self._resolved.info.vocab_size, rows)
                    runner.rehearse()
                else:
                    longest = min(tokens, self._resolved.max_model_len)
                    for power in range(longest.bit_length()):  # kernels differ by the number of tokens
                        self._try(runner, 1 << power, rows=1)
                # A long chunk takes other tiles than many short ones.
                chunk = min(self._resolved.max_num_batched_tokens, _REHEARSED_CHUNK, self._resolved.max_model_len)
                self._try(runner, chunk, rows=1)
                torch.cuda.synchronize()
        except (AttributeError, TypeError) as error:  # another version of Triton may be made otherwise inside
            _log.warning("kernels are compiled one by one, at their first launch: %s", error)
            return None
        return rehearsal

    def _trial_runner(self, assembly: Assembly, *, with_graphs: bool = True) -> Runner | PoolingRunner:
        """One on a cache of one block, for steps that launch the kernels of a whole one, and take its memory: layers of
        one make do the same one after the other."""
        runner = assembly.runner(1, self._resolved.max_model_len, with_graphs=with_graphs)
        if isinstance(runner, Runner):
            runner.parts.layers = 1
        return runner

    def _measure(self, assembly: Assembly) -> Memory:
        """What the device has, and what a runner on a cache of one block and the largest step there can be take of it.

        Others may live in this process: what counts is by how much these make the allocator grow.
        """
        activations = 0
        if self._device.type != "cpu":
            activations = self._platform.growth(partial(self._run_largest, assembly))
            self._platform.release()
        return Memory(
            is_cpu=self._device.type == "cpu",
            free=self._platform.free_bytes() // (self._rank.size if self._device.type == "cpu" else 1),
            weights=self._model.num_bytes(),
            activations=activations,
            kept=_kept[self._device],
        )

    def _run_largest(self, assembly: Assembly) -> None:
        runner, tokens = self._trial_runner(assembly, with_graphs=False), assembly.max_tokens
        self._try(runner, tokens).result()
        if isinstance(runner, Runner):
            if self._adapters is not None:  # what rows with adapters take besides
                runner.parts.seats.adapters_np[1:] = 1
                self._try(runner, tokens).result()
            # Everything that few requests ask for, once, so that the first of them does not wait for a compiler.
            info, seats = self._resolved.info, self._resolved.max_num_seqs
            run_picky(runner, ALL_FEATURES, info.vocab_size, seats).result()

    def _try(self, runner: Runner | PoolingRunner, tokens: int, rows: int | None = None) -> StepHandle | MaskedStep:
        """A step of so many tokens in so many rows; None: as many as there can be."""
        if isinstance(runner, Runner):
            runner.parts.seats.restart()
        return runner.run(self._step(tokens, rows))

    def _step(self, tokens: int, rows: int | None) -> StepPlan:
        counts = spread(tokens, rows or min(tokens, self._resolved.max_num_seqs), self._max_model_len)
        if self._resolved.pooler is None:
            given = embeddings(counts, self._model.hidden) if self._resolved.config.model.enable_prompt_embeds else []
            return prompt_chunks(counts, attachments=given)
        return prompts_to_pool(counts)

    # -- serve --------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepHandle | MaskedStep:
        """Start a step; never waits for the device."""
        if self.runner is None:
            raise ConfigError("the worker was not started")
        self._awaiting = None
        named = nullcontext() if self._profiler is None else self._profiler.step(plan.step)
        with plain_torch(self._platform.plain_torch), named:
            step = self.runner.run(plan)
        if isinstance(step, MaskedStep):
            self._awaiting = step
        return step

    def mask(self, masks: TokenMasks) -> None:
        """Let the latest step sample; nothing to do if it could not even be launched."""
        if self._awaiting is not None:
            with plain_torch(self._platform.plain_torch):
                self._awaiting.mask(masks)
            self._awaiting = None

    @property
    def model(self) -> Decoder | PoolingModel:
        """As it computes, with its parameters on the device."""
        return self._model

    def call(self, method: str | Callable[..., Any], *args: Any) -> Any:
        """Utilities outside the steps, in the thread that runs these.

        "memory" → bytes by use; "begin_adapter" and "load_adapter", key and path; "is_adapter_read" and "drop_adapter",
        key; "prepare" → whether there is more to prepare; "rebalance_experts" → layers whose experts have moved;
        "profile", "start" or "stop" → the trace's path.
        A function, which only a caller in this process can hand over, gets the worker and the arguments.
        """
        if not isinstance(method, str):
            with plain_torch(self._platform.plain_torch):
                return method(self, *args)
        methods: dict[str, Callable[..., Any]] = {
            "memory": self._memory,
            "prepare": self._prepare,
            "profile": self._profile,
            "rebalance_experts": self._rebalance,
        }
        if self._adapters is not None:
            methods |= {"load_adapter": self._adapters.load, "drop_adapter": self._adapters.drop}
            methods |= {"begin_adapter": self._adapters.begin_read, "is_adapter_read": self._adapters.is_read}
        if method not in methods:
            known = ", ".join(methods)
            raise InputError(f"the worker has no method {method!r} ({len(args)} arguments given); it has: {known}")
        return methods[method](*args)

    def _memory(self) -> dict[str, int]:
        return {"free": self._platform.free_bytes(), "free_at_start": self._free_at_start}

    def _rebalance(self) -> int:
        if self._group is None or not isinstance(self.runner, Runner):
            return 0
        group = self._group
        with self.runner.on_stream():
            return sum(one.rebalance(group) for one in self._model.modules() if isinstance(one, Experts))

    def _profile(self, what: str, prefix: str | None = None) -> str | None:
        if self._profiler is None:
            raise InputError("profiling is off: start the engine with profiler_config", "profiler_config")
        if what not in ("start", "stop"):
            raise InputError(f"profile must be 'start' or 'stop', got {what!r}")
        if what == "stop":
            return self._profiler.stop()
        self._profiler.start(prefix, self._model)
        return None

    def _prepare(self) -> bool:
        """Some milliseconds of what a start can do without: one size of step, as a graph or from Python. To be asked
        while nothing runs."""
        if isinstance(self.runner, Runner) and self.runner.capture_another():
            return True
        if self._unprepared and isinstance(self.runner, Runner):
            tokens = self._unprepared.pop()
            counts = spread(tokens, min(tokens, self._resolved.max_num_seqs), self._max_model_len)
            self.runner.prepare(prompt_chunks(counts, seats=np.zeros(len(counts), dtype=np.int32)))
        return bool(self._unprepared)

    def shutdown(self) -> None:
        """Give the device's memory and the process's threads back; also after a start that failed half-way."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._count_kept()
        self.runner = self._awaiting = self._adapters = None
        self.__dict__.pop("_model", None)
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._streams is not None:
            self._streams.give_back()
            self._streams = None
        if torch.cuda.is_initialized():
            clear_workspaces(idle_streams())
            torch.cuda.empty_cache()
        self._platform.release()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None


def _wait_for(rehearsal: Rehearsal | None) -> None:
    if rehearsal is not None:
        rehearsal.wait()


def _forget_frames(error: BaseException) -> None:
    """Whoever keeps an error, as a notebook does, shall not keep the tensors of those it went through."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
