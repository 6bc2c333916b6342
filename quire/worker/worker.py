"""Device up, load, measure, allocate, capture; then plans."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from quire.attention.base import AttentionSpec
from quire.attention.select import select, select_for_prompts
from quire.config.resolve import Resolved
from quire.foundation.errors import ConfigError, DoesNotFitError
from quire.foundation.log import get_logger
from quire.models import catalog, weights
from quire.models.base import DecoderStack
from quire.models.pooling import PoolingModel
from quire.platforms import select_platform
from quire.types.kv import KVGroupSpec, WorkerReport
from quire.types.plan import Admit, Attachment, AwaitMasks, NewBlocks, Pool, StepPlan, TokenMasks
from quire.types.sampling import SamplingParams
from quire.worker.batch import SIZE_STEP, BatchBuilder, round_size
from quire.worker.graphs import decode_sizes, graph_rows
from quire.worker.kv_store import KVStore
from quire.worker.masked_step import MaskedStep
from quire.worker.mixed_graphs import MAX_PROMPTS, mixed_sizes, with_prefixes
from quire.worker.padded import PaddedSteps
from quire.worker.pooling_runner import PoolingRunner, decoder_contexts, encoder_contexts
from quire.worker.prefixes import PrefixRows
from quire.worker.readback import StepHandle
from quire.worker.runner import Runner
from quire.worker.sampling.custom import CustomProcessors, make_processors
from quire.worker.sampling.plugins import LogitsProcessor, ProcessorSetup
from quire.worker.sampling.sampler import Sampler
from quire.worker.seats import Seats

if TYPE_CHECKING:
    from quire.kernels.triton.rehearsal import Rehearsal

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_GIB = 1024**3
_SPARE_BYTES = 3 * _GIB // 8  # for kernel modules and graph pools, which no measurement before them can see
_STAGED_INTS = 1 << 20
_log = get_logger(__name__)
_REHEARSED_TOKENS = 4096  # enough to be many, for every kernel
# A CPU reads so small a model within a millisecond on one core: more threads would mostly wait for each other, and wait
# very long as soon as another process wants their core.
_SMALL_MODEL = 64 * 1024**2
_ALL_FEATURES = SamplingParams(
    temperature=0.5,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    min_tokens=1,
    logit_bias={0: 1.0},
    allowed_token_ids=[0, 1],
    bad_words_token_ids=[[0, 1]],
    logprobs=1,
)


class Worker:
    """One device's muscle. Knows plans and arrays, nothing of requests, text or time."""

    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self._phases: dict[str, float] = {}
        self._notes: list[str] = []
        self.runner: Runner | PoolingRunner | None = None
        self._unprepared: list[int] = []  # sizes of steps whose products the library has not loaded yet, falling
        self._processors: list[LogitsProcessor] = []
        self._awaiting: MaskedStep | None = None  # the latest step, if it waits for its masks

    # -- start --------------------------------------------------------------------------------------------------

    def start(self) -> WorkerReport:
        """Bring the model up. Raises ConfigError (and kin) if it cannot run here."""
        config, info = self._resolved.config, self._resolved.info
        with self._phase("device"):
            self._platform = select_platform(self._resolved.device)
            self._device = self._platform.set_up(config.runtime.num_threads)
            self._free_at_start = self._platform.free_bytes()
        dtype = _DTYPES[self._resolved.dtype]
        setup = ProcessorSetup(info.vocab_size, self._device, Path(info.path))
        self._processors = make_processors(config.model.logits_processors, setup)
        with self._phase("build"):
            pooler, positions = self._resolved.pooler, self._resolved.max_model_len
            model: DecoderStack | PoolingModel
            if pooler is None:
                model = catalog.build(info, dtype, self._device, positions)
            else:
                model = catalog.build_for_pooling(info, pooler, dtype, self._device, positions)
        if self._device.type == "cpu" and not config.runtime.num_threads and model.num_bytes() < _SMALL_MODEL:
            torch.set_num_threads(1)
        self._model = model
        self._spec: KVGroupSpec = model.kv_spec(config.cache.block_size, _DTYPES[self._resolved.kv_dtype])
        with self._phase("rehearse"):
            rehearsal = self._rehearse()
        with self._phase("weights"):
            weights.load(
                model,
                Path(info.path),
                load_format=config.model.load_format,
                show_progress=config.model.use_tqdm_on_load,
                seed=config.model.seed,
            )
        with self._phase("compile"):
            if rehearsal is not None:
                rehearsal.wait()
        with self._phase("profile"):
            activation_bytes = self._profile()
        num_blocks, max_model_len = self._size_cache(activation_bytes)
        with self._phase("kv_cache"):
            self.runner = self._build_runner(num_blocks, max_model_len)
        with self._phase("graphs"):
            if isinstance(self.runner, Runner):
                self.runner.capture()
        if self._device.type == "cuda" and isinstance(self.runner, Runner):
            most = round_size(self._resolved.max_num_batched_tokens)
            self._unprepared = list(range(most, 0, -SIZE_STEP))
        return WorkerReport(
            device=self._platform.device_name(),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            groups=[self._spec],
            vocab_size=info.vocab_size,
            weight_bytes=model.num_bytes(),
            kv_bytes=num_blocks * self._spec.bytes_per_block,
            free_bytes=self._platform.free_bytes(),
            attention_backend=self._backend_name,
            phases=self._phases,
            mixed_sizes=self.runner.mixed_sizes if isinstance(self.runner, Runner) else [],
            can_prepare=bool(self._unprepared),
            max_num_batched_tokens=self._max_tokens,
            notes=self._notes,
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._phases[name] = time.perf_counter() - began

    @property
    def _max_tokens(self) -> int:
        """Of a step; where nothing is kept between steps, one must hold the longest prompt."""
        wanted = self._resolved.max_num_batched_tokens
        if self._spec.kind != "none" or self._resolved.config.schedule.max_num_batched_tokens is not None:
            return wanted
        return max(wanted, self._resolved.max_model_len)

    def _attention_spec(self, max_tokens: int, max_model_len: int) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self._model.num_heads,
            num_kv_heads=self._spec.num_kv_heads,
            head_dim=self._spec.head_dim,
            block_size=self._spec.block_size,
            dtype=_DTYPES[self._resolved.dtype],
            kv_dtype=_DTYPES[self._resolved.kv_dtype],
            device=self._device,
            max_rows=self._resolved.max_num_seqs,
            max_tokens=max_tokens,
            max_seq_len=max_model_len,
            sliding_window=self._model.sliding_window,
        )

    def _build_runner(self, num_blocks: int, max_model_len: int, *, with_graphs: bool = True) -> Runner | PoolingRunner:
        store = KVStore(self._spec, num_blocks, _DTYPES[self._resolved.kv_dtype], self._device)
        seats = Seats(
            self._resolved.max_num_seqs,
            -(-max_model_len // self._spec.block_size),
            store.token_of_slot,
            self._spec.block_size,
            self._device,
        )
        if isinstance(self._model, PoolingModel):
            return self._build_pooling_runner(self._model, store, seats, max_model_len)
        return self._build_generating_runner(self._model, store, seats, max_model_len, with_graphs=with_graphs)

    def _build_pooling_runner(
        self, model: PoolingModel, store: KVStore, seats: Seats, max_model_len: int
    ) -> PoolingRunner:
        resolved, rows, tokens = self._resolved, self._resolved.max_num_seqs, self._max_tokens
        spec, name = self._attention_spec(tokens, max_model_len), resolved.config.runtime.attention_backend
        if model.is_causal:
            backend = select(name, spec)
            self._backend_name, contexts = backend.name, decoder_contexts(backend, store)
        else:
            prompts = select_for_prompts(name, spec)
            self._backend_name, contexts = prompts.name, encoder_contexts(prompts)
        return PoolingRunner(
            model,
            contexts,
            seats,
            BatchBuilder(seats, None, rows, tokens, max_model_len, self._device),
            max_rows=rows,
            staging_capacity=max(_STAGED_INTS, 2 * tokens + 8 * rows),
            device=self._device,
        )

    def _build_generating_runner(
        self, model: DecoderStack, store: KVStore, seats: Seats, max_model_len: int, *, with_graphs: bool
    ) -> Runner:
        resolved, device = self._resolved, self._device
        rows, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
        eager = resolved.config.runtime.enforce_eager or not with_graphs
        wanted = [] if eager else graph_rows(rows, resolved.config.runtime.cuda_graph_sizes)
        num_weights = self._model.num_bytes() // _DTYPES[resolved.dtype].itemsize
        mixed = [] if eager else mixed_sizes(rows, tokens, num_weights)
        backend = select(
            resolved.config.runtime.attention_backend,
            self._attention_spec(max([tokens, *(size.tokens for size in mixed)]), max_model_len),
        )
        self._backend_name = backend.name
        if not backend.graph_support:
            wanted, mixed = [], []
        heads_per_kv_head = self._model.num_heads // self._spec.num_kv_heads
        prefixes = PrefixRows(rows, heads_per_kv_head) if backend.prefix_support else None
        if backend.prefix_support:
            mixed = with_prefixes(mixed)
        custom = CustomProcessors(self._processors, seats.num_computed_np) if self._processors else None
        padded = PaddedSteps(seats, mixed, heads_per_kv_head, max_model_len, device) if mixed else None
        return Runner(
            model,
            backend,
            store,
            seats,
            BatchBuilder(seats, prefixes, rows, tokens, max_model_len, device, pads=device.type == "cuda"),
            Sampler(rows, resolved.info.vocab_size, rows + MAX_PROMPTS, device, custom),
            max_rows=rows,
            staging_capacity=max(_STAGED_INTS, 2 * tokens + 8 * rows),
            device=device,
            decode_sizes=decode_sizes(wanted, backend.prefix_support),
            padded=padded,
        )

    # -- measuring ----------------------------------------------------------------------------------------------

    def _rehearse(self) -> Rehearsal | None:
        """Go through every kind of step while the weights are not there yet, so that the kernels get compiled."""
        if self._device.type == "cpu":
            return None
        from quire.kernels.triton.rehearsal import Rehearsal

        rows = self._resolved.max_num_seqs
        tokens = max(rows, min(self._resolved.max_num_batched_tokens, _REHEARSED_TOKENS))
        runner = self._build_runner(1, self._resolved.max_model_len)
        try:
            with Rehearsal() as rehearsal:
                runner.run(self._dummy_step(tokens))
                if isinstance(runner, Runner):
                    # What is sampled here is garbage, so nothing may be looked up by it.
                    self._run_picky(runner, msgspec.structs.replace(_ALL_FEATURES, logprobs=None))
                    runner.rehearse()
                else:
                    longest = min(tokens, self._resolved.max_model_len)
                    for power in range(longest.bit_length()):  # kernels differ by the number of tokens
                        runner.run(self._dummy_step(1 << power, rows=1))
                torch.cuda.synchronize()
        except (AttributeError, TypeError) as error:  # another version of Triton may be made otherwise inside
            _log.warning("kernels are compiled one by one, at their first launch: %s", error)
            return None
        return rehearsal

    def _profile(self) -> int:
        """Run the largest step there can be on a cache of one block; returns the bytes it took beside the weights."""
        if self._device.type == "cpu":
            return 0
        runner = self._build_runner(1, self._resolved.max_model_len, with_graphs=False)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        runner.run(self._dummy_step(self._max_tokens)).result()
        if isinstance(runner, Runner):
            # Once through everything that few requests ask for, so that the first of them does not wait for a compiler.
            self._run_picky(runner, _ALL_FEATURES).result()
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_reserved() - self._model.num_bytes()
        del runner
        torch.cuda.empty_cache()
        return taken

    def _run_picky(self, runner: Runner, params: SamplingParams) -> MaskedStep:
        """A step with everything that few requests ask for."""
        counts = np.array([2, 3], dtype=np.int32)
        step = runner.run(_dummy_plan(counts, [Admit(1, 0, 2, params, [0], 0)], [AwaitMasks()]))
        assert isinstance(step, MaskedStep)
        words = -(-self._resolved.info.vocab_size // 32)
        step.mask(TokenMasks(step.step, np.array([1], dtype=np.int32), np.full((1, words), -1, dtype=np.int32)))
        return step

    def _dummy_step(self, tokens: int, rows: int | None = None) -> StepPlan:
        """Of so many tokens in so many rows; None: as many as there can be."""
        counts = _spread(tokens, rows or min(tokens, self._resolved.max_num_seqs))
        if self._resolved.pooler is None:
            return _dummy_plan(counts, [])
        if self._spec.kind == "none":
            counts = np.minimum(counts, self._resolved.max_model_len)
        every, none = np.ones(len(counts), dtype=bool), np.zeros(len(counts), dtype=bool)
        pool = Pool(np.arange(len(counts), dtype=np.int32), every, none, counts)
        admits = [Admit(seat, 0, int(n), SamplingParams(), [], 0) for seat, n in enumerate(counts, 1)]
        return msgspec.structs.replace(_dummy_plan(counts, admits), samples=none, attachments=[pool])

    def _size_cache(self, activation_bytes: int) -> tuple[int, int]:
        """Blocks of the KV cache and the context length it can hold.

        Raises DoesNotFitError, with the bytes short and the option to change, if one request cannot fit.
        """
        resolved, cache = self._resolved, self._resolved.config.cache
        if self._spec.kind == "none":  # a block a seat, and the null block
            return resolved.max_num_seqs + 1, resolved.max_model_len
        block_size, block_bytes = self._spec.block_size, self._spec.bytes_per_block
        budget, why = self._cache_budget(activation_bytes)
        longest = -(-resolved.max_model_len // block_size)
        useful = resolved.max_num_seqs * longest + 1  # more blocks than all seats can ever hold serve nobody
        num_blocks = cache.num_gpu_blocks_override or min(int(budget // block_bytes), useful)
        fits = (num_blocks - 1) * block_size
        if fits >= resolved.max_model_len:
            return num_blocks, resolved.max_model_len
        needed = (longest + 1) * block_bytes
        if resolved.max_model_len_is_explicit or fits < block_size:
            raise DoesNotFitError(
                f"the KV cache may take {budget / _GIB:.2f} GiB ({why}), which holds {max(fits, 0)} tokens; "
                f"max_model_len={resolved.max_model_len} needs {needed / _GIB:.2f} GiB, "
                f"{(needed - budget) / _GIB:.2f} GiB more: lower --max-model-len, raise "
                f"{'--cpu-kv-cache-memory-bytes' if self._device.type == 'cpu' else '--gpu-memory-utilization'}, "
                "or free memory",
                "max_model_len",
            )
        self._notes.append(
            f"max_model_len={fits}: the model's {resolved.max_model_len} tokens would need "
            f"{needed / _GIB:.2f} GiB of KV cache, {budget / _GIB:.2f} GiB are there"
        )
        return num_blocks, fits

    def _cache_budget(self, activation_bytes: int) -> tuple[float, str]:
        cache = self._resolved.config.cache
        if self._device.type == "cpu":
            if cache.cpu_kv_cache_memory_bytes:
                return cache.cpu_kv_cache_memory_bytes, "cpu_kv_cache_memory_bytes"
            return self._platform.free_bytes() / 4, "a quarter of the free memory"
        if cache.kv_cache_memory_bytes:
            return cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        share = cache.gpu_memory_utilization
        weight_bytes = self._model.num_bytes()
        budget = self._free_at_start * share - weight_bytes - activation_bytes - _SPARE_BYTES
        return budget, (
            f"{share:.0%} of the {self._free_at_start / _GIB:.1f} GiB free at start, less "
            f"{weight_bytes / _GIB:.1f} GiB weights and {activation_bytes / _GIB:.1f} GiB activations"
        )

    # -- serve --------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepHandle | MaskedStep:
        """Start a step; never waits for the device."""
        if self.runner is None:
            raise ConfigError("the worker was not started")
        self._awaiting = None
        step = self.runner.run(plan)
        if isinstance(step, MaskedStep):
            self._awaiting = step
        return step

    def mask(self, masks: TokenMasks) -> None:
        """Let the latest step sample; nothing to do if it could not even be launched."""
        if self._awaiting is not None:
            self._awaiting.mask(masks)
            self._awaiting = None

    def call(self, method: str, *args: Any) -> Any:
        """Utilities outside the steps: "memory" → bytes by use; "prepare" → whether there is more to prepare."""
        if method == "memory":
            return {"free": self._platform.free_bytes(), "free_at_start": self._free_at_start}
        if method == "prepare":
            return self._prepare()
        raise ConfigError(f"the worker has no method {method!r} ({len(args)} arguments given)")

    def _prepare(self) -> bool:
        """A few milliseconds of what a start can do without: one size of step. To be asked while nothing runs."""
        if self._unprepared and isinstance(self.runner, Runner):
            tokens = self._unprepared.pop()
            counts = _spread(tokens, min(tokens, self._resolved.max_num_seqs))
            self.runner.prepare(_dummy_plan(counts, [], seats=np.zeros(len(counts), dtype=np.int32)))
        return bool(self._unprepared)

    def shutdown(self) -> None:
        """Give the device's memory back; also after a start that failed half-way."""
        self.runner = self._awaiting = None
        self.__dict__.pop("_model", None)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _spread(tokens: int, rows: int) -> np.ndarray:
    """Tokens of each of the rows, int32, as even as it goes."""
    counts = np.full(rows, tokens // rows, dtype=np.int32)
    counts[: tokens % rows] += 1
    return counts


def _dummy_plan(
    counts: np.ndarray,
    admits: list[Admit],
    attachments: Sequence[Attachment] = (),
    seats: np.ndarray | None = None,
) -> StepPlan:
    """A step of prompt chunks of the given lengths whose KV all goes to the null block."""
    nothing = np.zeros(0, dtype=np.int32)
    return StepPlan(
        step=0,
        admits=admits,
        seats=np.arange(1, len(counts) + 1, dtype=np.int32) if seats is None else seats,
        num_tokens=counts,
        num_decodes=0,
        token_ids=np.ones(int(counts.sum()), dtype=np.int32),
        samples=np.ones(len(counts), dtype=bool),
        blocks=[NewBlocks(nothing, nothing, nothing)],
        max_seq_len=int(counts.max()),
        attachments=[*attachments],
    )
