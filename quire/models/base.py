"""The trunk that every decoder-only model shares: embed, layers, final norm, logits."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from quire.attention.base import PLAIN, HeadDims, Scores
from quire.attention.context import StepContext
from quire.attention.recurrent import StatePart
from quire.config.reading import read, read_positive
from quire.distributed.group import Group
from quire.distributed.sums_under_way import SumsUnderWay
from quire.foundation.errors import ConfigError
from quire.kernels.across_ranks import gather_columns
from quire.kernels.elementwise.activation import softcap_
from quire.layers.attention import Keeps, SelfAttention
from quire.layers.block import DecoderLayer
from quire.layers.embedding import Embedding
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.layers.norm import NoNorm, Norm, RMSNorm
from quire.layers.recurrent.base import Recurrent
from quire.layers.unit_rows import UnitRows
from quire.types.kv import KVGroupSpec
from quire.types.stages import Stage


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that every family's config.json spells the same way."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def read(cls, config: Mapping[str, Any], eps: str = "rms_norm_eps") -> Sizes:
        """eps: the key of the norms' epsilon. Raises ConfigError for what cannot be."""
        hidden, heads = read_positive(config, "hidden_size"), read_positive(config, "num_attention_heads")
        kv_heads = read_positive(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        return cls(
            vocab=read_positive(config, "vocab_size"),
            hidden=hidden,
            intermediate=read_positive(config, "intermediate_size", 4 * hidden),
            layers=read_positive(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=read_positive(config, "head_dim", hidden // heads),
            eps=read(float, config, eps),
        )

    @classmethod
    def without_attention(cls, config: Mapping[str, Any], eps: float) -> Sizes:
        """Of a model none of whose layers attends: as if it had one head. Raises ConfigError for what cannot be."""
        hidden, layers = read_positive(config, "hidden_size"), read_positive(config, "num_hidden_layers")
        vocab = read_positive(config, "vocab_size")
        return cls(vocab, hidden, 4 * hidden, layers, heads=1, kv_heads=1, head_dim=hidden, eps=eps)

    @property
    def attention(self) -> tuple[int, int, int, int]:
        """Hidden size, heads, key and value heads, and a head's: in the order that layers of attention take them."""
        return self.hidden, self.heads, self.kv_heads, self.head_dim


def learned_positions(config: Mapping[str, Any], max_positions: int, first: int = 0) -> tuple[int, int]:
    """Of a `DecoderStack` that has as many as config.json says, and `first` more before them.

    Raises ConfigError if these are too few.
    """
    count = read_positive(config, "max_position_embeddings")
    if max_positions > count:
        raise ConfigError(f"max_model_len must be <= {count} for this model, got {max_positions}", "max_model_len")
    return count + first, first


class Model(Protocol):
    """What loading and sizing ask of any model."""

    @property
    def num_heads(self) -> int: ...

    @property
    def layer_groups(self) -> list[int]:
        """The number of each layer's group; empty for a model that keeps nothing."""
        ...

    @property
    def layer_states(self) -> list[tuple[StatePart, ...]]:
        """What each layer that keeps a state does, in the order of their caches."""
        ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    @property
    def file_name(self) -> Callable[[str], str | None]:
        """From what files call a tensor to what the family's own checkpoints do; None: it is not the family's."""
        ...

    def checkpoint_name(self, path: str) -> str:
        """What checkpoints call the tensor at `path` in the module tree."""
        ...

    def known_name(self, tensor: str) -> str | None:
        """`checkpoint_name` of a checkpoint's tensor, which may spell it otherwise; None if the model has no use for
        it."""
        ...

    def is_elsewhere(self, tensor: str) -> bool:
        """Whether a tensor, by the name that `known_name` gives it, is another stage's."""
        ...

    def other_names(self, module: str) -> tuple[str, ...]:
        """What checkpoints may call a module besides, in their settings."""
        ...

    @property
    def twins(self) -> dict[str, str]:
        """Tensors of checkpoints that must equal another of the model's, if they are there at all, and which."""
        ...

    def kv_groups(self, block_size: int, dtype: torch.dtype | None = None) -> list[KVGroupSpec]:
        """Layers that keep the same kind of thing, the ones that keep all of it first. dtype: of the cache; by default
        the weights'."""
        ...

    def num_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    def num_weights(self) -> int:
        """Numbers that a token is multiplied by, as these stand for."""
        ...


@dataclass(frozen=True, slots=True)
class GivenEmbeddings:
    tokens: torch.Tensor  # int64 [n]: places in the step
    values: torch.Tensor  # [n, hidden], of the weights' dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What checkpoints call things.

    parts: our modules, and theirs, each a piece of a path, "" to leave it out. trunk: those beside the layers, where
    parts of layers are called alike. prefix: before all names but the head's.
    is_optional: files may leave the prefix out. unused: what they hold besides, as a pattern of names.
    """

    parts: Mapping[str, str] = field(default_factory=dict)
    trunk: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model."
    is_optional: bool = False
    unused: str | None = None

    def checkpoint_name(self, path: str) -> str:
        modules = path.split(".")
        first, *others = modules
        theirs = self.trunk.get(first) or self.parts.get(first, first)
        named = ".".join(filter(None, (theirs, *(self.parts.get(module, module) for module in others))))
        return named if modules[0] == "lm_head" else self.prefix + named

    def known_name(self, tensor: str) -> str | None:
        head = self.parts.get("lm_head", "lm_head")
        if self.is_optional and not tensor.startswith((self.prefix, f"{head}.")):
            tensor = self.prefix + tensor
        return None if self.unused and re.search(self.unused, tensor) else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """What becomes of the head's products: cap · tanh(scale · product / cap); softcap 0: scale · product."""

    scale: float = 1.0
    softcap: float = 0.0
    bias: bool = False

    @classmethod
    def divided(cls, config: Mapping[str, Any], key: str) -> Logits:
        """By a number of config.json. Raises ConfigError if it is 0."""
        number = read(float, config, key)
        if number <= 0:
            raise ConfigError(f"config.json: {key} must be > 0, got {number:g}", key)
        return cls(scale=1 / number)


class Decoder(nn.Module):
    """A language model as the worker sees it: tokens and a paged cache in, states and logits out."""

    graph_support = True  # its steps may be captured in CUDA graphs
    is_foreign = False  # somebody else's code, which may do what graphs do not allow
    may_be_rehearsed = True  # its steps may be gone through with garbage for numbers
    group: Group | None = None  # of ranks that share it
    file_name: Callable[[str], str | None] = str  # what the model's own checkpoint would call a file's tensor
    files_names: Callable[[str], tuple[str, ...]] | None = None  # and what else files may call a module
    hidden: int
    num_heads: int
    scores: list[Scores]  # of attention, by group
    layer_groups: list[int]
    _keeps: list[Keeps]  # by group

    @property
    def is_causal(self) -> bool:
        return True

    def forward(
        self,
        input_ids: torch.Tensor,
        ctx: StepContext,
        layers: int | None = None,
        given: GivenEmbeddings | None = None,
    ) -> torch.Tensor:
        """input_ids int32 [tokens] → something of all tokens, [tokens, hidden].

        layers: 1, to warm up: one of each make will do. given: what some tokens are instead of their ids' embeddings.
        """
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: rows of what `forward` returned, [rows, hidden] → float32 [rows, vocab], in `out` if given."""
        raise NotImplementedError

    def own_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same of this rank's share of the vocabulary, [rows, as many as any rank has], of a model with a group."""
        raise NotImplementedError

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: rows of what `forward` returned → the model's own last hidden states, which logits are made of."""
        raise NotImplementedError

    def checkpoint_name(self, path: str) -> str:
        raise NotImplementedError

    def known_name(self, tensor: str) -> str | None:
        raise NotImplementedError

    def is_elsewhere(self, tensor: str) -> bool:  # noqa: ARG002
        return False

    def other_names(self, module: str) -> tuple[str, ...]:
        return () if self.files_names is None else self.files_names(module)

    @property
    def twins(self) -> dict[str, str]:
        raise NotImplementedError

    def check(self) -> None:
        """Once the weights are there. Raises ConfigError if the model cannot be served as it is."""

    @property
    def layer_states(self) -> list[tuple[StatePart, ...]]:
        """What each layer that keeps a state does, in the order of their caches."""
        return []

    def kv_groups(self, block_size: int, dtype: torch.dtype | None = None) -> list[KVGroupSpec]:
        most_state = max((sum(part.num_bytes for part in parts) for parts in self._every_state), default=0)
        return [
            KVGroupSpec(
                kind=keeps.kind,
                block_size=block_size,
                num_layers=self._layers_of_group(number),
                num_kv_heads=keeps.num_kv_heads,
                head_dim=keeps.head_dim,
                dtype_bytes=(dtype or next(self.parameters()).dtype).itemsize,
                window=keeps.window,
                planes=1 if keeps.value_dim else 2,
                value_dim=keeps.value_dim,
                state_bytes=most_state if keeps.kind == "state" else 0,
            )
            for number, keeps in enumerate(self._keeps)
        ]

    @property
    def made(self) -> list[HeadDims | None]:
        """What heads make of what is kept, by group: of latent rows alone."""
        return [keeps.made for keeps in self._keeps]

    @property
    def _every_state(self) -> list[tuple[StatePart, ...]]:
        """Those of other stages too."""
        return self.layer_states

    def _layers_of_group(self, number: int) -> int:
        """As many as any stage has, since all lay their caches out alike."""
        return self.layer_groups.count(number)

    def num_bytes(self) -> int:
        return num_bytes(self)

    def num_weights(self) -> int:
        return num_weights(self)

    def prompt_weights(self) -> int:
        """Of these those that each token of a prompt is multiplied by."""
        raise NotImplementedError

    def expert_bytes(self, tokens: int | None = None) -> float:
        """Of all experts' weights; or of those that so many tokens hit."""
        return sum(module.num_bytes(tokens) for module in self.modules() if isinstance(module, Experts))


class DecoderStack(Decoder):
    """A decoder-only language model that is declared.

    layer: makes the decoder layer of a given number. tied: logits come from the embedding matrix. norm: the last one;
    None: an RMS norm. embedding_scale: that embeddings are multiplied by. input_scale: the same, given ones too.
    positions: learned ones, (how many, which of them is the first token's). embed_norm: that embeddings go through.
    unit_head: each of the head's rows is divided by its length.
    Submodules are named as in checkpoints, but for what `naming` says.
    """

    has_one_stream = True  # all that goes from layer to layer

    def __init__(
        self,
        sizes: Sizes,
        layer: Callable[[int], nn.Module],
        *,
        tied: bool,
        norm: Norm | None = None,
        naming: Naming | None = None,
        logits: Logits | None = None,
        embedding_scale: float = 1.0,
        input_scale: float = 1.0,
        positions: tuple[int, int] | None = None,
        embed_norm: Norm | None = None,
        unit_head: bool = False,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.hidden, self.num_heads = sizes.hidden, sizes.heads
        self.naming, self._logits = naming or Naming(), logits or Logits()
        self.embed_tokens = Embedding(sizes.vocab, sizes.hidden, scale=embedding_scale)
        self.embed_positions = Embedding(positions[0], sizes.hidden) if positions else None
        self.embed_norm = embed_norm
        self._input_scale = input_scale
        self._first_position = positions[1] if positions else 0
        self.layers = nn.ModuleList(layer(index) for index in range(sizes.layers))
        self._keeps, self.layer_groups = _grouped(self.layers)
        self.scores = _scores(self.layers, len(self._keeps))
        self.norm = norm or RMSNorm(sizes.hidden, sizes.eps)
        bias = self._logits.bias
        head = UnitRows if unit_head else Linear
        self._is_tied = tied
        self.lm_head = None if tied else head(sizes.hidden, sizes.vocab, bias=bias, role="vocabulary")
        self._whole_prompts = 0  # tokens of one at most, see `look_both_ways`
        self.stage = Stage(0, len(self.layers), len(self.layers))
        self._elsewhere: tuple[str, ...] = ()  # beginnings of names of tensors that are other stages'
        self._most_layers: list[int] = []  # of each group that any stage has; empty: there is one stage
        self._others: tuple[Recurrent, ...] = ()  # layers of other stages that keep a state

    @cached_property
    def _samples(self) -> list[nn.Module]:
        """The first layer of each make."""
        found: dict[Hashable, nn.Module] = {}
        for layer in self.layers:
            found.setdefault(_make(layer), layer)
        return list(found.values())

    @property
    def is_causal(self) -> bool:
        return not self._whole_prompts

    @property
    def keeps(self) -> list[Keeps]:
        """What the layers of each group keep; of one that is not causal, what they attend to."""
        return self._keeps

    def look_both_ways(self, max_tokens: int) -> None:
        """Be an encoder: see whole prompts, of so many tokens at most, both ways, and keep nothing of them. A layer's
        window is then so many tokens to either side besides its own, as transformers has it.

        Raises ConfigError if it has layers that cannot.
        """
        usual = all(keeps.kind in ("full", "window") for keeps in self._keeps)
        if not self._keeps or not usual or 0 < len(self.layer_groups) < len(self.layers):
            raise ConfigError("attention both ways is for models whose every layer has attention of the usual kind")
        self.scores = [replace(one, window=one.window + 1) if one.window else one for one in self.scores]
        self._whole_prompts = max_tokens

    def head_in_layers(self) -> float:
        """The head's work, in layers: half of what its weights say, since a prompt has logits of one token alone, and
        attention takes its time beside a layer's weights."""
        every = sum(one.whole_weights for one in self.layers.modules() if isinstance(one, Linear | Experts))
        return self.hidden * self.sizes.vocab * len(self.layers) / every / 2

    def keep(self, stages: Sequence[Stage], number: int) -> None:
        """Before `allocate`: be one of several stages, which together are the model. Layers keep their names, and
        groups their numbers; caches are counted anew.

        Raises ConfigError if more than the residual stream goes from layer to layer.
        """
        if not self.has_one_stream:
            raise ConfigError(
                "this model's layers see more than the layer before them, and are not dealt to stages: it must be 1",
                "pipeline_parallel_size",
            )
        stage, every = stages[number], [*self.layers]
        groups = [[keeper.group for keeper in _keepers(every[one.begin : one.end])] for one in stages]
        self._most_layers = [max(own.count(group) for own in groups) for group in range(len(self._keeps))]
        gone = [f"layers.{index}." for index in range(len(every)) if not stage.begin <= index < stage.end]
        others = [*every[: stage.begin], *every[stage.end :]]
        self._others = tuple(keeper for keeper in _keepers(others) if isinstance(keeper, Recurrent))
        self.layers = nn.ModuleList()
        for index in range(stage.begin, stage.end):
            self.layers.add_module(str(index), every[index])
        keepers = _keepers(self.layers)
        for index, keeper in enumerate(keepers):
            keeper.index = index
        self.layer_groups = [keeper.group for keeper in keepers]
        if not stage.is_first:
            gone += ["embed_positions.", "embed_norm."]
            self.embed_positions = self.embed_norm = None
            if not (stage.is_last and self.lm_head is None):
                gone.append("embed_tokens.")
                self.embed_tokens = Embedding(0, self.hidden)
        if not stage.is_last:
            gone.append("norm.")
            if not (stage.is_first and self._is_tied):  # then it may be all that is stored of the embeddings
                gone.append("lm_head.")
            self.norm, self.lm_head = NoNorm(), None
        self._elsewhere = tuple(self.checkpoint_name(f"{path}weight").removesuffix("weight") for path in gone)
        self.stage = stage

    def is_elsewhere(self, tensor: str) -> bool:
        return tensor.startswith(self._elsewhere)

    def join(self, group: Group) -> None:
        """Be the share of one of several ranks. Raises ConfigError if they cannot share it."""
        topology = group.topology
        if any(keeps.kind != "state" for keeps in self._keeps):
            self.num_heads = topology.share(self.num_heads, "num_attention_heads")
        self._keeps = [
            keeps
            if keeps.kind == "state"
            else keeps._replace(num_kv_heads=topology.heads(keeps.num_kv_heads, "num_key_value_heads"))
            for keeps in self._keeps
        ]
        self.group = group

    def norm_in_sums(self) -> None:
        """See `DecoderLayer.norm_in_sums`."""
        for layer, following in pairwise([*self.layers, None]):
            if isinstance(layer, DecoderLayer):
                layer.norm_in_sums(following)

    def forward(
        self,
        input_ids: torch.Tensor,
        ctx: StepContext,
        layers: int | None = None,
        given: GivenEmbeddings | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids int32 [tokens] → the residual stream after the last layer, [tokens, hidden], until the next step.

        layers: 1, to warm up: one of each make, for whose layers kernels are alike. given: what some tokens are instead
        of their ids' embeddings. residual: the stream behind the stage before this one, which is written over.
        """
        if residual is None:
            residual = self._embedded(input_ids, ctx, given)
        under_way = self._under_way(residual)
        if under_way is not None:
            residual, ctx = under_way.hold(residual), replace(ctx, under_way=under_way)
        for layer in self.layers if layers is None else self._samples:
            residual = layer(residual, ctx)
        if under_way is not None:
            under_way.finish(residual)
        return residual

    def _under_way(self, residual: torch.Tensor) -> SumsUnderWay | None:
        """What lets sums over ranks be under way while products run; None: in this step it would not pay."""
        under_way = None if self.group is None else self.group.under_way
        if under_way is None or not self.takes_pieces or not under_way.takes(residual):
            return None
        return None if residual.is_cuda and torch.cuda.is_current_stream_capturing() else under_way

    @cached_property
    def takes_pieces(self) -> bool:
        """Whether all layers ask the step for rows before they read them, whose sums may be under way."""
        return all(getattr(layer, "takes_pieces", False) for layer in self.layers)

    def _embedded(self, input_ids: torch.Tensor, ctx: StepContext, given: GivenEmbeddings | None) -> torch.Tensor:
        residual: torch.Tensor = self.embed_tokens(input_ids)
        if given is not None:
            residual.index_copy_(0, given.tokens, given.values)
        if self._input_scale != 1.0:
            residual.mul_(self._input_scale)
        if self.embed_positions is not None:
            residual.add_(self.embed_positions(ctx.positions + self._first_position))
        if self.embed_norm is not None:
            residual = self.embed_norm(residual)
        return residual

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: rows of what `forward` returned, [rows, hidden] → float32 [rows, vocab], written to `out` if given.

        The final norm belongs here: only rows whose logits are wanted go through it. Of ranks the first has them.
        """
        if self.group is None:
            return self.own_logits(hidden, out)
        part = self.own_logits(hidden)
        if out is None:
            out = torch.empty((len(hidden), self.sizes.vocab), dtype=torch.float32, device=hidden.device)
        return gather_columns(part, out, self.group)

    def own_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Of this rank's share of the vocabulary, as wide as any rank's."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return self._shaped(head.wide(hidden, self.norm, out))

    def _shaped(self, logits: torch.Tensor) -> torch.Tensor:
        how = self._logits
        if how.softcap:
            return softcap_(logits, how.softcap, how.scale)
        return logits if how.scale == 1.0 else logits.mul_(how.scale)

    @property
    def logits_are_products(self) -> bool:
        """Of states and the head's rows, and nothing else."""
        return self._logits == Logits()

    def output_row(self, token: int) -> torch.Tensor:
        """What makes the logit of a token of a state, in a model whose `logits_are_products`: float32 [hidden]."""
        if self.lm_head is None:
            return self.embed_tokens.dense(torch.float32, slice(token, token + 1))[0]
        (share,) = self.lm_head.shares
        place = token - share.begin
        if self.group is None:
            return self.lm_head.matrix.dense(torch.float32, slice(place, place + 1))[0]
        row = torch.zeros(self.hidden, dtype=torch.float32, device=self.embed_tokens.weight.device)
        if share.begin <= token < share.end:
            row.copy_(self.lm_head.matrix.dense(torch.float32, slice(place, place + 1))[0])
        return self.group.sum(row)

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: rows of what `forward` returned → the model's own last hidden states, which logits are made of."""
        return self.norm(hidden)  # type: ignore[no-any-return]

    def known_name(self, tensor: str) -> str | None:
        return self.naming.known_name(tensor)

    @property
    def twins(self) -> dict[str, str]:
        head = self.checkpoint_name("lm_head.weight")
        has_both = self._is_tied and (self.stage.is_first or self.stage.is_last)
        return {head: self.checkpoint_name("embed_tokens.weight")} if has_both else {}

    def checkpoint_name(self, path: str) -> str:
        return self.naming.checkpoint_name(path)

    def kv_groups(self, block_size: int, dtype: torch.dtype | None = None) -> list[KVGroupSpec]:
        if self.is_causal:
            return super().kv_groups(block_size, dtype)
        # A request's one block is but a number.
        block_size = 1 << (self._whole_prompts - 1).bit_length()
        return [KVGroupSpec("none", block_size, 0, *self._keeps[0][1:3], self.embed_tokens.weight.itemsize)]

    @property
    def layer_states(self) -> list[tuple[StatePart, ...]]:
        return [keeper.states for keeper in _keepers(self.layers) if isinstance(keeper, Recurrent)]

    @property
    def others_with_states(self) -> Sequence[Recurrent]:
        """Layers of other stages, which say what pages must hold."""
        return self._others

    @property
    def _every_state(self) -> list[tuple[StatePart, ...]]:
        return [*self.layer_states, *(layer.states for layer in self._others)]

    def _layers_of_group(self, number: int) -> int:
        return self._most_layers[number] if self._most_layers else super()._layers_of_group(number)

    def prompt_weights(self) -> int:
        return num_weights(self.layers)


def num_bytes(module: nn.Module) -> int:
    """Of its parameters."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def num_weights(module: nn.Module) -> int:
    """Numbers that a token is multiplied by, however they are kept: of experts those of the few that it goes to."""
    return sum(
        child.num_weights()
        if isinstance(child, Linear | Experts)
        else sum(p.numel() for p in child.parameters(recurse=False))
        for child in module.modules()
    )


def _scores(layers: nn.ModuleList, groups: int) -> list[Scores]:
    """Of attention, by group: one backend serves the layers of each."""
    found: dict[int, Scores] = {}
    for attention in layers.modules():
        if (
            isinstance(attention, SelfAttention)
            and found.setdefault(attention.group, attention.scores) != attention.scores
        ):
            raise ConfigError(
                "layers that keep the same, of which some have another soft cap or alone have sinks or slopes, are not "
                "supported"
            )
    return [found.get(group, PLAIN) for group in range(groups)]  # of a group of states: nothing


def _grouped(layers: nn.ModuleList) -> tuple[list[Keeps], list[int]]:
    """What each group keeps, and the number of each layer's group, which the layers are told."""
    keepers = _keepers(layers)
    keeps = sorted(
        {keeper.keeps for keeper in keepers}, key=lambda keeps: (keeps.kind not in ("full", "latent"), keeps)
    )
    for index, keeper in enumerate(keepers):
        keeper.index, keeper.group = index, keeps.index(keeper.keeps)
    return keeps, [keeper.group for keeper in keepers]


def keep_states_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Have the states of all scans in this type, those of other stages too."""
    others = model.others_with_states if isinstance(model, DecoderStack) else ()
    for layer in (*model.modules(), *others):
        if isinstance(layer, Recurrent):
            layer.keep_in(dtype)


def _keepers(layers: Iterable[nn.Module]) -> list[SelfAttention | Recurrent]:
    """All that has a cache, in the order of their numbers; of one number in that of the layer."""
    every = (module for layer in layers for module in layer.modules())
    found = (module for module in every if isinstance(module, SelfAttention | Recurrent))
    return sorted(found, key=lambda keeper: keeper.index)


def _make(layer: nn.Module) -> Hashable:
    """Equal for layers for which the same kernels run: of the same parts, whose tensors are alike and go to the same
    group."""
    parts = tuple(
        (type(part), part.group if isinstance(part, SelfAttention | Recurrent) else None) for part in layer.modules()
    )
    return parts, tuple((name, tensor.shape, tensor.dtype) for name, tensor in layer.named_parameters())
