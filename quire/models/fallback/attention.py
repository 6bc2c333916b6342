"""transformers' attention interface: what its models call where they attend, and what stands behind it here.

A model is told a name of an attention function. That function finds who attends now on the module that calls: while a
model is looked at somebody who notes what is asked for (`Recorder`), later the paged cache (`PagedAttention`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import nn

from quire.attention.base import LayerCache, PerHead, Scores
from quire.attention.context import GroupContext, StateCache, StepContext
from quire.foundation.errors import ConfigError
from quire.kernels.attention.rope import qk_norm_rope_write
from quire.layers.attention import Keeps
from quire.layers.rotary import no_rotation

SERVING, LOOKING = "quire", "quire_looking"  # attention functions; only the second one asks for masks
_PLACE = "quire_attention"  # where a module has its `Door`
# Arguments of attention functions that change nothing here: of training, of caches, of what is given back; and those
# that a mask says as well.
_HARMLESS = frozenset(
    """
    dropout position_ids sliding_window use_cache output_attentions output_hidden_states cache_position
    past_key_values past_key_value position_embeddings layer_idx output_router_logits return_dict training
    deterministic target_dtype
    """.split()  # noqa: SIM905
)

_PER_HEAD = ("s_aux", "alibi_slopes")  # what they call sinks and slopes


class Attends(Protocol):
    def __call__(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        scale: float | None,
        others: Mapping[str, Any],
    ) -> torch.Tensor:
        """q [1, heads, tokens, head_dim]; k, v [1, kv_heads, tokens, ...] → [1, tokens, heads, value_dim]."""
        ...


@dataclass(slots=True)
class Door:
    """Who attends for the modules of a model."""

    attends: Attends


class Unseen:
    """Stands for a mask, which is not made: a function of positions. Whoever wants more of it cannot run here."""

    def __init__(self, sees: Callable[..., torch.Tensor], device: torch.device) -> None:
        self.sees = sees
        self.device = torch.device("cpu") if device.type == "meta" else device  # where nothing can be read off

    def scores(self, tokens: int) -> Scores | None:
        """Which of so many tokens each of them sees: all before it, a window, its chunk; None: it is otherwise."""
        ends = {0, 1, 2, tokens // 3, tokens // 2, tokens - 1}
        ends |= {place for power in range(tokens.bit_length()) for place in ((1 << power) - 1, 1 << power)}
        queries = torch.tensor(sorted(place for place in ends if place < tokens), device=self.device)
        keys = torch.arange(tokens, device=self.device)
        seen = torch.stack([self.sees(0, 0, query, keys).expand(tokens) for query in queries])
        width = int(self.sees(0, 0, keys, keys.new_zeros(())).expand(tokens).sum())  # of those that see the first one
        kinds = [Scores()] if width == tokens else [Scores(width), Scores(width, chunked=True)]
        return next((one for one in kinds if torch.equal(seen, one.visible(keys, queries[:, None]))), None)


def register() -> None:
    """Make our attention known to transformers, under both names."""
    utils = import_module("transformers.modeling_utils")
    masks = import_module("transformers.masking_utils")
    for name in (SERVING, LOOKING):
        utils.ALL_ATTENTION_FUNCTIONS.register(name, _attend)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(LOOKING, _mask)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    door: Door = module.__dict__[_PLACE]
    return door.attends(module, query, key, value, attention_mask, scaling, others), None


def _mask(*, mask_function: Callable[..., torch.Tensor], device: torch.device, **_: Any) -> Unseen:
    return Unseen(mask_function, torch.device(device))


def hang(model: nn.Module, door: Door) -> None:
    """Let all modules of `model` attend by way of `door`."""
    for module in model.modules():
        module.__dict__[_PLACE] = door


def use(model: Any, name: str) -> None:
    """Tell a model of transformers the name of its attention function; parts may have configs of their own."""
    model.config._attn_implementation = name
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


# -- what a model asks for --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Site:
    """One of the times that a forward pass attends."""

    module: nn.Module
    heads: int
    keeps: Keeps
    scores: Scores
    value_dim: int
    scale: float

    @property
    def kind(self) -> tuple[Keeps, Scores]:
        """What layers of one group have in common."""
        return self.keeps, self.scores


class Recorder:
    """Notes what each attention of a forward pass is. max_positions: of a text. names: of the modules.

    Raises ConfigError for what the paged cache and its backends do not do.
    """

    def __init__(self, names: Mapping[nn.Module, str], max_positions: int) -> None:
        self.sites: list[Site] = []
        self._names, self._max_positions = names, max_positions
        self._seen: dict[int, Scores | None] = {}  # of masks that were looked at
        self._masks: list[Unseen] = []  # which must live as long as their ids are used

    def __call__(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        scale: float | None,
        others: Mapping[str, Any],
    ) -> torch.Tensor:
        name = self._names[module]
        (_, heads, tokens, head_dim), (_, kv_heads, seen, _), value_dim = q.shape, k.shape, v.shape[-1]
        odd = [key for key, value in others.items() if key not in _HARMLESS and value is not None]
        if wrong := [key for key in odd if key not in ("softcap", "is_causal", *_PER_HEAD)]:
            raise _refused(name, f"has {', '.join(wrong)}, which attention here does not know")
        if seen != tokens or len(q) != 1:
            raise _refused(name, f"has {tokens} queries and {seen} keys a token: it attends to something else")
        if value_dim > head_dim:
            raise _refused(name, f"has values of {value_dim} numbers and keys of {head_dim}")
        terms = terms_of(others)
        for what, values in zip(("sinks", "slopes"), terms, strict=True):
            if values is not None and values.shape != (heads,):
                raise _refused(name, f"has {list(values.shape)} {what} for {heads} heads")
        seen_tokens = self._sees(module, name, mask, others)
        scores = replace(
            seen_tokens,
            softcap=float(others.get("softcap") or 0.0),
            sinks=terms.sinks is not None,
            slopes=terms.slopes is not None,
        )
        kind = "chunk" if scores.chunked else "window" if scores.window else "full"
        keeps = Keeps(kind, kv_heads, head_dim, scores.window)
        scale = head_dim**-0.5 if scale is None else float(scale)
        self.sites.append(Site(module, heads, keeps, scores, value_dim, scale))
        return own_value(q, v)

    def _sees(self, module: nn.Module, name: str, mask: Any, others: Mapping[str, Any]) -> Scores:
        if mask is None:
            causal = others.get("is_causal")
            if not (getattr(module, "is_causal", True) if causal is None else causal):
                raise _refused(name, "sees what comes behind a token")
            return Scores()
        if not isinstance(mask, Unseen):
            raise _refused(name, "makes a mask of its own")
        if id(mask) not in self._seen:
            self._masks.append(mask)
            self._seen[id(mask)] = mask.scores(self._max_positions)
        found = self._seen[id(mask)]
        if found is None:
            raise _refused(name, "sees neither all tokens before it nor a window or chunk of them")
        return found


def terms_of(others: Mapping[str, Any]) -> PerHead:
    """What attention functions are told of each head: a logit, and what is taken from a score for each token that lies
    between (ALiBi), as the library flash-attention has it."""
    found: list[torch.Tensor | None] = [others.get(name) for name in _PER_HEAD]
    return PerHead(*(None if one is None else one.flatten().float() for one in found))


def own_value(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What attention gives if each token sees but itself."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2).contiguous()


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"through transformers, {name} {why}", "model_impl")


# -- serving ----------------------------------------------------------------------------------------------------


class PagedAttention:
    """The forward passes of steps: keys and values go to the cache, and queries attend to what is there.

    groups: of the sites.
    """

    def __init__(self, sites: list[Site], groups: list[int], device: torch.device) -> None:
        self._sites, self._groups = sites, groups
        # Tables of one line, by head_dim: what is given is turned already.
        self._still = {size: no_rotation(1, size).to(device) for size in {site.keeps.head_dim for site in sites}}
        self._place = 0  # the site that is next
        self._ctx: StepContext | None = None
        self._first = self._each = torch.empty(0)
        self._told: tuple[object, torch.Tensor] | None = None

    def begin(self, ctx: StepContext) -> None:
        """A forward pass begins."""
        self._ctx, self._place, self._told = ctx, 0, None
        self._first = torch.zeros_like(ctx.positions)
        self._each = torch.arange(len(ctx.positions), dtype=torch.int32, device=ctx.positions.device)

    def end(self) -> None:
        self._ctx = self._told = None
        self._first = self._each = torch.empty(0)

    def table(
        self,
        turned: tuple[torch.Tensor, torch.Tensor] | None,
        make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor | None:
        """What layers are told of the step's positions, as our kernels have it; made once for all that are told the
        same."""
        if turned is None:
            return None
        if self._told is None or self._told[0] is not turned[0]:
            self._told = (turned[0], make(*turned))
        return self._told[1]

    def enter(
        self, module: nn.Module, table: torch.Tensor | None
    ) -> tuple[LayerCache | StateCache, GroupContext, tuple[torch.Tensor, torch.Tensor]]:
        """The next site, which must be this module's: its cache, its group, and by which table its tokens turn: which
        lines are theirs. table: a line a token; None: nothing turns."""
        site, cache, group = self._next(module)
        if table is None:
            return cache, group, (self._still[site.keeps.head_dim], self._first)
        return cache, group, (table, self._each)

    def _next(self, module: nn.Module) -> tuple[Site, LayerCache | StateCache, GroupContext]:
        ctx, place = self._ctx, self._place
        if ctx is None or place == len(self._sites) or self._sites[place].module is not module:
            raise RuntimeError("a model of transformers attends in another order than it did before")
        self._place += 1
        return self._sites[place], ctx.caches[place], ctx.groups[self._groups[place]]

    def __call__(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,  # noqa: ARG002 (nobody makes any)
        scale: float | None,  # noqa: ARG002 (the site's)
        others: Mapping[str, Any],
    ) -> torch.Tensor:
        site, cache, group = self._next(module)
        assert isinstance(cache, LayerCache)
        head_dim = site.keeps.head_dim
        if site.value_dim < head_dim:
            v = nn.functional.pad(v, (0, head_dim - site.value_dim))
        tokens = q.shape[2]
        qkv = torch.cat([x[0].transpose(0, 1).reshape(tokens, -1) for x in (q, k, v)], dim=1)
        q = qk_norm_rope_write(
            qkv, self._still[head_dim], self._first, group.slots, cache.k, cache.v, site.heads, site.keeps.num_kv_heads,
            head_dim,
        )  # fmt: skip
        y = group.backend.run(q, cache, group.plan, site.scale, terms_of(others))
        return y.view(1, tokens, site.heads, head_dim)[..., : site.value_dim].contiguous()
