"""The runner of a model: KV store, seats, attention backend, graphs and sampler, put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attention.base import AttentionSpec
from quire.attention.select import select, select_for_prompts
from quire.config.resolve import Resolved
from quire.models.base import DecoderStack
from quire.models.pooling import PoolingModel
from quire.types.kv import KVGroupSpec, PromptCost
from quire.worker.batch import BatchBuilder
from quire.worker.graphs import decode_sizes, drafted_sizes, graph_rows
from quire.worker.kv_store import KVStore
from quire.worker.mixed_graphs import MAX_PROMPTS, mixed_sizes, with_prefixes
from quire.worker.padded import PaddedSteps
from quire.worker.pooling_runner import PoolingRunner, decoder_contexts, encoder_contexts
from quire.worker.prefixes import PrefixRows
from quire.worker.runner import Runner
from quire.worker.sampling.custom import CustomProcessors
from quire.worker.sampling.plugins import LogitsProcessor
from quire.worker.sampling.sampler import Sampler
from quire.worker.seat_drafts import SeatDrafts, drafted_rows
from quire.worker.seats import DeviceSeats
from quire.worker.streams import Streams

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_STAGED_INTS = 1 << 20


class Assembly:
    """Makes runners of one model, on caches of any size. Raises ConfigError where no attention backend will do."""

    def __init__(
        self,
        resolved: Resolved,
        model: DecoderStack | PoolingModel,
        spec: KVGroupSpec,
        device: torch.device,
        streams: Streams,
    ) -> None:
        self._resolved = resolved
        self._model = model
        self._spec = spec
        self._device = device
        self._streams = streams
        self.backend_name = ""  # of the runner made last
        self._prompt_wave = 0  # likewise

    @property
    def whole_prompts(self) -> bool:
        """Whether nothing is kept between steps, so that one must hold the longest prompt."""
        return self._spec.kind == "none"

    @property
    def max_tokens(self) -> int:
        """Of a step."""
        wanted = self._resolved.max_num_batched_tokens
        if not self.whole_prompts or self._resolved.config.schedule.max_num_batched_tokens is not None:
            return wanted
        return max(wanted, self._resolved.max_model_len)

    def runner(
        self,
        num_blocks: int,
        max_model_len: int,
        *,
        with_graphs: bool = True,
        processors: Sequence[LogitsProcessor] = (),
    ) -> Runner | PoolingRunner:
        """A runner on a cache of so many blocks; its graphs are still to be captured."""
        store = KVStore(self._spec, num_blocks, DTYPES[self._resolved.kv_dtype], self._device)
        seats = DeviceSeats(
            self._resolved.max_num_seqs,
            -(-max_model_len // self._spec.block_size),
            store.token_of_slot,
            self._spec.block_size,
            self._device,
            limited=self._resolved.speculative is not None,
        )
        if isinstance(self._model, PoolingModel):
            return self._pooling(self._model, store, seats, max_model_len)
        custom = CustomProcessors(processors, seats.num_computed_np) if processors else None
        return self._generating(self._model, store, seats, max_model_len, custom, with_graphs=with_graphs)

    def _pooling(self, model: PoolingModel, store: KVStore, seats: DeviceSeats, max_model_len: int) -> PoolingRunner:
        rows, tokens = self._resolved.max_num_seqs, self.max_tokens
        spec, name = self._attention(tokens, max_model_len), self._resolved.config.runtime.attention_backend
        if model.is_causal:
            backend = select(name, spec)
            self.backend_name, contexts = backend.name, decoder_contexts(backend, store)
        else:
            prompts = select_for_prompts(name, spec)
            self.backend_name, contexts = prompts.name, encoder_contexts(prompts)
        return PoolingRunner(
            model,
            contexts,
            seats,
            BatchBuilder(seats, None, rows, tokens, max_model_len, self._device),
            max_rows=rows,
            staging_capacity=max(_STAGED_INTS, 2 * tokens + 8 * rows),
            device=self._device,
            stream=self._streams.compute,
        )

    def _generating(
        self,
        model: DecoderStack,
        store: KVStore,
        seats: DeviceSeats,
        max_model_len: int,
        custom: CustomProcessors | None,
        *,
        with_graphs: bool,
    ) -> Runner:
        resolved, device = self._resolved, self._device
        rows, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
        eager = resolved.config.runtime.enforce_eager or not with_graphs
        wanted = [] if eager else graph_rows(rows, resolved.config.runtime.cuda_graph_sizes)
        num_weights = model.num_bytes() // DTYPES[resolved.dtype].itemsize
        mixed = [] if eager else mixed_sizes(rows, tokens, num_weights)
        backend = select(
            resolved.config.runtime.attention_backend,
            self._attention(max([tokens, *(size.tokens for size in mixed)]), max_model_len),
        )
        self.backend_name = backend.name
        self._prompt_wave = backend.prompt_wave
        if not backend.graph_support:
            wanted, mixed = [], []
        heads_per_kv_head = model.num_heads // self._spec.num_kv_heads
        prefixes = PrefixRows(rows, heads_per_kv_head) if backend.prefix_support else None
        if backend.prefix_support:
            mixed = with_prefixes(mixed)
        drafts = self._drafts(seats)
        padded = PaddedSteps(seats, mixed, heads_per_kv_head, max_model_len, device) if mixed else None
        return Runner(
            model,
            backend,
            store,
            seats,
            BatchBuilder(seats, prefixes, rows, tokens, max_model_len, device, pads=device.type == "cuda"),
            Sampler(
                rows,
                resolved.info.vocab_size,
                max(rows + MAX_PROMPTS, drafts.max_tokens if drafts else 0),
                device,
                custom,
            ),
            max_rows=rows,
            staging_capacity=max(_STAGED_INTS, 2 * tokens + 8 * rows),
            device=device,
            streams=self._streams,
            decode_sizes=decode_sizes(wanted, backend.prefix_support),
            padded=padded,
            drafts=drafts,
            drafted_sizes=drafted_sizes(drafts.max_rows, drafts.width) if drafts and wanted else (),
        )

    def _drafts(self, seats: DeviceSeats) -> SeatDrafts | None:
        resolved = self._resolved
        if resolved.speculative is None:
            return None
        rows = resolved.max_num_seqs
        return SeatDrafts(
            resolved.speculative, seats, rows, rows + MAX_PROMPTS, resolved.max_num_batched_tokens, self._device
        )

    def prompt_cost(self) -> PromptCost:
        """By operations: a weight of the layers costs a token two, attending to one token four a head and dimension."""
        if not isinstance(self._model, DecoderStack):
            return PromptCost()
        weights = sum(parameter.numel() for parameter in self._model.layers.parameters())
        heads = self._spec.num_layers * self._model.num_heads * self._spec.head_dim
        return PromptCost(2 * heads / weights, self._prompt_wave, self._model.sliding_window or 0)

    def _attention(self, max_tokens: int, max_model_len: int) -> AttentionSpec:
        wanted, rows = self._resolved.speculative, self._resolved.max_num_seqs
        width = 1 + (wanted.num_speculative_tokens if wanted else 0)
        return AttentionSpec(
            num_heads=self._model.num_heads,
            num_kv_heads=self._spec.num_kv_heads,
            head_dim=self._spec.head_dim,
            block_size=self._spec.block_size,
            dtype=DTYPES[self._resolved.dtype],
            kv_dtype=DTYPES[self._resolved.kv_dtype],
            device=self._device,
            max_rows=rows,
            max_tokens=max_tokens,
            max_seq_len=max_model_len,
            drafted=(drafted_rows(rows, self._resolved.max_num_batched_tokens, width), width) if width > 1 else (0, 1),
            sliding_window=self._model.sliding_window,
        )
