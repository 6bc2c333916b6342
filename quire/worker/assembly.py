"""The runner of a model: KV store, seats, attention backend, graphs and sampler, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quire.attention.base import AttentionSpec, StepPlanner
from quire.attention.recurrent import RecurrentRows
from quire.attention.select import select, select_for_prompts
from quire.config.devices import platform_of
from quire.config.resolve import Resolved
from quire.distributed.group import Group
from quire.distributed.peer_memory import Layout
from quire.distributed.sums_under_way import MakeAdd, Steps
from quire.kernels.across_ranks import parts_adder
from quire.models.base import Decoder, DecoderStack
from quire.models.pooling import PoolingModel
from quire.types.kv import ModelWork, PromptCost
from quire.worker.adapters import Adapters
from quire.worker.batch import BatchBuilder, round_size
from quire.worker.ceilings import ceilings
from quire.worker.graphs import decode_sizes, drafted_sizes, graph_rows
from quire.worker.kv_store import KVStore
from quire.worker.layer_groups import LayerGroups
from quire.worker.mixed_graphs import MAX_PROMPTS, MixedSize, mixed_sizes, with_twins
from quire.worker.padded import PaddedSteps
from quire.worker.pages import Pages
from quire.worker.pooling_runner import PoolingRunner, decoder_contexts, encoder_contexts
from quire.worker.prefixes import PrefixRows
from quire.worker.runner import Runner
from quire.worker.sampling.custom import CustomProcessors
from quire.worker.sampling.follower import Follower
from quire.worker.sampling.plugins import LogitsProcessor
from quire.worker.sampling.sampler import Sampler
from quire.worker.seat_drafts import SeatDrafts, drafted_rows, told_drafts
from quire.worker.seats import DeviceSeats
from quire.worker.steps.parts import StepParts
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
        model: Decoder | PoolingModel,
        pages: Pages,
        device: torch.device,
        streams: Streams,
        group: Group | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._resolved = resolved
        self._adapters = adapters
        self._platform = platform_of(resolved.device)
        self._group = group
        self._model = model
        self._pages = pages
        self._device = device
        self._streams = streams
        self.backend_name = ""  # of the runner made last
        self._prompt_wave = 0  # likewise

    @property
    def whole_prompts(self) -> bool:
        """Whether nothing is kept between steps, so that one must hold the longest prompt."""
        return self._pages.whole_prompts

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
        pages = self._pages
        keeper, dtype = pages.groups[pages.keeper], DTYPES[self._resolved.kv_dtype]
        store = KVStore(pages, self._model.layer_groups, num_blocks, dtype, self._device, self._model.layer_states)
        seats = DeviceSeats(
            self._resolved.max_num_seqs,
            keeper.num_blocks(max_model_len) * pages.splits[pages.keeper],
            store.token_of_slot,
            pages.kernel_block(pages.keeper),
            self._device,
            limited=self._resolved.speculative is not None,
            adapted=self._adapters is not None,
        )
        seats.add_groups(pages, max_model_len)
        if isinstance(self._model, PoolingModel):
            return self._pooling(self._model, store, seats, max_model_len)
        custom = CustomProcessors(processors, seats.num_computed_np) if processors else None
        return self._generating(self._model, store, seats, max_model_len, custom, with_graphs=with_graphs)

    def _pooling(self, model: PoolingModel, store: KVStore, seats: DeviceSeats, max_model_len: int) -> PoolingRunner:
        rows, tokens = self._resolved.max_num_seqs, self.max_tokens
        reads_host = None
        if model.is_causal:
            groups = self._layer_groups(seats, tokens, max_model_len)
            contexts, reads_host = decoder_contexts(groups, store), groups.reads_host
        else:
            name, trunk = self._resolved.config.runtime.attention_backend, model.trunk
            usual = self._attention(0, tokens, max_model_len)
            specs = [
                replace(usual, num_kv_heads=keeps.num_kv_heads, head_dim=keeps.head_dim, scores=scores)
                for keeps, scores in zip(trunk.keeps, trunk.scores, strict=True)
            ]
            prompts = [select_for_prompts(name, spec, self._platform) for spec in specs]
            contexts = encoder_contexts(prompts, specs, trunk.layer_groups)
            self.backend_name = prompts[0].name
        return PoolingRunner(
            model,
            contexts,
            store.states,
            seats,
            BatchBuilder(seats, None, rows, tokens, max_model_len, self._device, host_copies=reads_host),
            max_rows=rows,
            staging_capacity=max(_STAGED_INTS, 2 * tokens + 8 * rows),
            device=self._device,
            stream=self._streams.compute,
            adapters=self._adapters,
        )

    def _generating(
        self,
        model: Decoder,
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
        mixed = [] if eager or self._in_stages else self._mixed_sizes(model)
        longest = max([round_size(tokens), *(size.tokens for size in mixed)])
        groups = self._layer_groups(seats, longest, max_model_len)
        self._prompt_wave = groups.prompt_wave
        seats.is_read |= groups.reads_host
        if not (groups.graph_support and model.graph_support):
            wanted, mixed = [], []
        heads_per_kv_head = model.num_heads // self._pages.groups[0].num_kv_heads
        prefixes = PrefixRows(rows, heads_per_kv_head) if groups.prefix_support else None
        adapted = self._adapters is not None
        mixed = with_twins(mixed, prefixes=groups.prefix_support, adapters=adapted, whole=groups.expands)
        drafts = self._drafts(seats)
        padded = PaddedSteps(seats, mixed, heads_per_kv_head, max_model_len, device) if mixed else None
        parts = StepParts(
            model,
            groups,
            store,
            seats,
            BatchBuilder(
                seats,
                prefixes,
                rows,
                tokens,
                max_model_len,
                device,
                pads=self._streams.compute is not None,
                host_copies=groups.reads_host,
            ),
            self._sampler(rows, drafts, custom),
            max_rows=rows,
            padded_rows=max((size.rows for size in mixed), default=0),
            staging_capacity=max(_STAGED_INTS, 2 * tokens + 8 * rows),
            device=device,
            streams=self._streams,
            drafts=drafts,
            group=self._group,
            adapters=self._adapters,
        )
        return Runner(
            parts,
            device,
            self._streams.compute,
            decode_sizes=decode_sizes(wanted, groups.prefix_support, adapted=adapted),
            drafted_sizes=drafted_sizes(drafts.max_rows, drafts.width, adapted=adapted) if drafts and wanted else (),
            padded=padded,
        )

    def _mixed_sizes(self, model: Decoder) -> list[MixedSize]:
        rows, tokens = self._resolved.max_num_seqs, self._resolved.max_num_batched_tokens
        layers = sum(group.num_layers for group in self._pages.groups)
        return mixed_sizes(rows, tokens, model.num_weights(), layers)

    @property
    def _in_stages(self) -> bool:
        """Stages have other weights each, and would not pad steps with prompts alike: these run from Python."""
        return self._group is not None and self._group.pipeline is not None

    def _drafts(self, seats: DeviceSeats) -> SeatDrafts | None:
        resolved = self._resolved
        if resolved.speculative is None:
            return None
        rows, group = resolved.max_num_seqs, self._group
        return SeatDrafts(
            resolved.speculative,
            seats,
            rows,
            rows + MAX_PROMPTS,
            resolved.max_num_batched_tokens,
            self._device,
            group,
        )

    def _sampler(self, rows: int, drafts: SeatDrafts | None, custom: CustomProcessors | None) -> Sampler | Follower:
        vocab_size = self._resolved.info.vocab_size
        group, peers = self._group, None
        # Copies share memory with their own ranks alone; and what processors do is known to the first rank alone.
        if group is not None and group.contexts is None and not self._resolved.config.model.logits_processors:
            peers = group.peers
        if group is not None and not group.samples:
            return Follower(rows, vocab_size, self._device, peers)
        most = max(rows + MAX_PROMPTS, drafts.max_tokens if drafts else 0)
        return Sampler(rows, vocab_size, most, self._device, custom, peers)

    def share_memory(self) -> None:
        """Let ranks write what they tell each other into each other's memory, where they can."""
        if self._group is None:
            return
        if self._group.pipeline is not None:
            tokens, dtype = round_size(self.max_tokens), DTYPES[self._resolved.dtype]
            self._group.pipeline.reserve(tokens, self._model.hidden, dtype)
        if self._streams.compute is None or self._group.topology.size == 1:
            return
        generates, rows = isinstance(self._model, Decoder), self._resolved.max_num_seqs
        wanted, tokens = self._resolved.speculative, self._resolved.max_num_batched_tokens
        num_drafts = wanted.num_speculative_tokens if wanted else 0
        drafted = drafted_rows(rows, tokens, 1 + num_drafts) * (1 + num_drafts) if wanted else 0
        self._group.share_memory(
            large=self._large_steps(),
            layout=Layout(
                size=self._group.topology.size,
                hidden=self._model.hidden,
                itemsize=DTYPES[self._resolved.dtype].itemsize,
                max_rows=2 * self.max_tokens,
                vocab=self._resolved.info.vocab_size if generates else 0,
                logit_rows=max(round_size(rows), rows + MAX_PROMPTS, drafted) if generates else 0,
                drafts=told_drafts(rows, num_drafts) if wanted else 0,
            ),
        )

    def _large_steps(self) -> tuple[Steps, MakeAdd] | None:
        """Those whose sums over ranks are worth having under way; None: there are none."""
        model, dtype = self._model, DTYPES[self._resolved.dtype]
        if not isinstance(model, DecoderStack) or self._resolved.config.lora.enable_lora or dtype.itemsize != 2:
            return None  # adapters know their tokens by their place in the step
        assert self._group is not None
        (operations,) = self._group.smallest(2 * model.prompt_weights() // len(model.layers))  # shares may differ
        rows = round_size(self.max_tokens)
        steps = Steps(self._group.topology.size, model.hidden, dtype, rows, operations)
        pays = model.takes_pieces and steps.piece_rows(rows) < rows and model.hidden % 16 == 0
        return (steps, parts_adder) if pays else None

    def prompt_cost(self) -> PromptCost:
        """By operations: a weight of the layers costs a token two, attending to one token four a head and dimension."""
        if not isinstance(self._model, Decoder):
            return PromptCost()
        weights = self._model.prompt_weights()
        full, windows = 0.0, []
        for group, made in zip(self._pages.groups, self._model.made, strict=False):
            dims = group.head_dim + (group.value_dim or group.head_dim)
            if made is not None and self._prompt_wave:  # keys and values are made, but for the rotary columns
                dims = sum(made) + group.head_dim - group.value_dim
            cost = group.num_layers * self._model.num_heads * dims / weights
            if group.kind in ("window", "chunk"):
                windows.append((group.window, cost))
            elif group.keeps_all:
                full += cost
        return PromptCost(full, self._prompt_wave, windows)

    def model_work(self, device_name: str) -> ModelWork:
        """Of a decoder, with what experts so many tokens hit."""
        model = self._model
        if not isinstance(model, Decoder):
            return ModelWork()
        weights, of_experts = model.prompt_weights(), model.expert_bytes()
        sizes = [2**power for power in range(15)] if of_experts else []
        hit = [(tokens, float(model.expert_bytes(tokens))) for tokens in sizes]
        rates = (0.0, 0.0)
        if self._resolved.config.observe.enable_mfu_metrics:
            rates = ceilings(device_name, self._device, DTYPES[self._resolved.dtype])
        return ModelWork(weights, model.num_weights() - weights, int(model.num_bytes() - of_experts), hit, *rates)

    def _layer_groups(self, seats: DeviceSeats, max_tokens: int, max_model_len: int) -> LayerGroups:
        """max_tokens: of a step, padding included."""
        name, pages = self._resolved.config.runtime.attention_backend, self._pages
        backends: list[StepPlanner] = [
            RecurrentRows()
            if group.kind == "state"
            else select(name, self._attention(number, max_tokens, max_model_len), self._platform)
            for number, group in enumerate(pages.groups)
            if group.kind != "history"
        ]
        self.backend_name = next((one.name for one in backends if one.name != RecurrentRows.name), RecurrentRows.name)
        return LayerGroups(pages, backends, seats, max_tokens, self._device)

    def _attention(self, number: int, max_tokens: int, max_model_len: int) -> AttentionSpec:
        return attention_spec(self._resolved, self._model, self._pages, number, self._device, max_tokens, max_model_len)


def attention_spec(
    resolved: Resolved,
    model: Decoder | PoolingModel,
    pages: Pages,
    number: int,
    device: torch.device,
    max_tokens: int,
    max_model_len: int,
) -> AttentionSpec:
    """What a backend has to serve for the group of that number. max_tokens: of a step, padding included."""
    wanted, rows = resolved.speculative, resolved.max_num_seqs
    width = 1 + (wanted.num_speculative_tokens if wanted else 0)
    group = pages.groups[number]
    return AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        block_size=pages.kernel_block(number),
        planes=pages.planes_a_slab(number) if group.num_layers else 1,
        value_dim=group.value_dim,
        dtype=DTYPES[resolved.dtype],
        kv_dtype=DTYPES[resolved.kv_dtype],
        device=device,
        max_rows=rows,
        max_tokens=max_tokens,
        max_seq_len=max_model_len,
        drafted=(drafted_rows(rows, resolved.max_num_batched_tokens, width), width) if width > 1 else (0, 1),
        scores=model.scores[number],
        made=model.made[number],
    )
