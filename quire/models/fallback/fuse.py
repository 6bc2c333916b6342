"""Layers of transformers' classes that compute what layers here do, computed by the same kernels.

Nothing goes by the name of a class. Modules that have the parts of Llama's attention, feed-forward layer or decoder
layer are watched while the model runs once; what ours make of the same inputs must come out alike, and only then do
ours take their places. What is left are plain products, which are ours too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from quire.attention.context import LayerCache
from quire.kernels.attention.rope import qk_norm_rope_write, rotate
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm.linear import linear
from quire.models.fallback.attention import Door, PagedAttention, Site, own_value
from quire.models.fallback.distance import distance
from quire.models.fallback.norms import Gain, gain_of

_OUT = ("o_proj", "out_proj", "dense", "c_proj")
_HIDDEN = "hidden_states"


@dataclass
class _Seen:
    """What a module was called with, and gave back."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    given: Any

    @property
    def rows(self) -> torch.Tensor | None:
        """[tokens, hidden], of an input [1, tokens, hidden]."""
        x = self.named.get(_HIDDEN, self.args[0] if self.args else None)
        return x[0] if isinstance(x, torch.Tensor) and x.dim() == 3 and len(x) == 1 else None


class _Notes:
    """Each token sees but itself; queries, keys and values are noted by module."""

    def __init__(self) -> None:
        self.found: dict[nn.Module, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,  # noqa: ARG002
        scale: float | None,  # noqa: ARG002
        others: Mapping[str, Any],  # noqa: ARG002
    ) -> torch.Tensor:
        self.found[module] = q, k, v
        return own_value(q, v)


class _Product:
    """Linear layers that read the same, as one: [outputs of all, inputs]; their parameters become views of it."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.weight, self.bias = layers[0].weight.data, None
        if len(layers) > 1:
            self.weight = torch.cat([layer.weight.data for layer in layers])
            for layer, part in zip(layers, self.weight.split([layer.out_features for layer in layers]), strict=True):
                layer.weight.data = part
        if any(layer.bias is not None for layer in layers):
            self.bias = torch.cat(
                [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
            )

    def __call__(
        self, x: torch.Tensor, norm: Gain | None = None, residual: torch.Tensor | None = None, *, gated: bool = False
    ) -> torch.Tensor:
        if norm is not None and norm[0].dtype != x.dtype:  # added to 1, in float32
            x, norm = rms_norm(x, *norm), None
        return linear(x, self.weight, self.bias, norm=norm, residual=residual, gated=gated)


@dataclass
class _Attention:
    """Of a site: one product for queries, keys and values; norms of heads, rotation and cache in one kernel."""

    site: Site
    qkv: _Product
    out: _Product
    norms: tuple[torch.Tensor | None, torch.Tensor | None, float]
    paged: PagedAttention

    def heads(self, x: torch.Tensor, norm: Gain | None, table: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of a few rows, [rows, heads, head_dim]."""
        q_weight, k_weight, eps = self.norms
        kv_heads, dim = self.site.keeps.num_kv_heads, self.site.keeps.head_dim
        sizes = [self.site.heads * dim, kv_heads * dim, kv_heads * dim]
        q, k, v = (part.unflatten(1, (-1, dim)) for part in self.qkv(x, norm).split(sizes, dim=1))
        if q_weight is not None and k_weight is not None:
            q, k = rms_norm(q.contiguous(), q_weight, eps), rms_norm(k.contiguous(), k_weight, eps)
        if table is not None:
            places = torch.arange(len(x), device=x.device)
            q, k = (rotate(part, table, places, interleaved=False) for part in (q, k))
        return q, k, v

    def add(
        self, x: torch.Tensor, norm: Gain | None, residual: torch.Tensor | None, table: torch.Tensor | None
    ) -> torch.Tensor:
        """`residual += attention(norm(x))` in place; without a residual, attention(norm(x))."""
        cache, group, turn = self.paged.enter(self.site.module, table)
        assert isinstance(cache, LayerCache)
        kv_heads, dim = self.site.keeps.num_kv_heads, self.site.keeps.head_dim
        q = qk_norm_rope_write(
            self.qkv(x, norm), *turn, group.slots, cache.k, cache.v, self.site.heads, kv_heads, dim, self.norms[0],
            self.norms[1], self.norms[2],
        )  # fmt: skip
        return self.out(group.backend.run(q, cache, group.plan, self.site.scale), residual=residual)


@dataclass
class _FeedForward:
    gate_up: _Product
    down: _Product
    act: Callable[[torch.Tensor], torch.Tensor] | None  # None: SiLU

    def add(self, x: torch.Tensor, norm: Gain | None, residual: torch.Tensor | None) -> torch.Tensor:
        """`residual += down(act(gate(norm(x))) · up(norm(x)))` in place; without a residual, that alone."""
        if self.act is None:
            inner = self.gate_up(x, norm, gated=True)
        else:
            gate, up = self.gate_up(x, norm).chunk(2, dim=1)
            inner = self.act(gate) * up
        return self.down(inner, residual=residual)


class _Made(Protocol):
    def __call__(self, x: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor: ...


@dataclass
class Fused:
    """How many modules of each kind are computed here."""

    layers: int = 0
    attention: int = 0
    feed_forward: int = 0
    products: int = 0
    kinds: dict[nn.Module, Any] = field(default_factory=dict)


def fuse(
    causal: nn.Module,
    door: Door,
    states: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    sites: list[Site],
    paged: PagedAttention,
    max_positions: int,
) -> Fused:
    """Once weights are there and norms are ours. states: goes through the model."""
    fused = Fused()
    seen, notes = _watch(causal, door, states, max_positions)
    places = [site.module for site in sites]
    for site in sites:
        if places.count(site.module) == 1 and site.module in seen and site.module in notes.found:
            attention = _attention(site, paged)
            if attention is not None and _attends_alike(attention, seen[site.module], notes.found[site.module]):
                fused.kinds[site.module] = attention
    for module in causal.modules():
        if module in seen and (mlp := _feed_forward(module)) is not None:
            x, given = seen[module].rows, seen[module].given
            if x is not None and isinstance(given, torch.Tensor) and _alike(mlp.add(x, None, None), given[0]):
                fused.kinds[module] = mlp
    inside: set[nn.Module] = set()
    for module in causal.modules():
        if module in seen and (made := _layer(module, seen[module], notes, fused.kinds)) is not None:
            _replace(module, door, paged, made, as_tuple=False)
            inside |= set(module.children())
            fused.layers += 1
    for module, kind in fused.kinds.items():
        if module in inside:
            continue
        if isinstance(kind, _Attention):
            given = seen[module].given
            made = partial(_alone, kind)
            _replace(module, door, paged, made, as_tuple=isinstance(given, tuple))
            fused.attention += 1
        else:
            _replace(module, door, paged, partial(_fed, kind), as_tuple=False)
            fused.feed_forward += 1
    fused.products = _plain_products(causal)
    return fused


def _fed(mlp: _FeedForward, x: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG001
    return mlp.add(x, None, None)


def _alone(attention: _Attention, x: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    return attention.add(x, None, None, table)


# -- what is there ------------------------------------------------------------------------------------------------


def _watch(
    causal: nn.Module, door: Door, states: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], max_positions: int
) -> tuple[dict[nn.Module, _Seen], _Notes]:
    """Three tokens' way through the model. Modules that are called twice are left out."""
    seen: dict[nn.Module, _Seen] = {}
    twice: set[nn.Module] = set()

    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], given: Any) -> None:
        twice.update({module} & seen.keys())
        kept = tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in args)
        told = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in named.items()}
        seen[module] = _Seen(kept, told, given)

    composed = [module for module in causal.modules() if any(True for _ in module.children())]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in composed]
    door.attends = notes = _Notes()
    weight = next(causal.parameters())
    try:
        ids = torch.arange(min(3, max_positions), device=weight.device)
        states(ids, ids.flip(0))
    finally:
        for hook in hooks:
            hook.remove()
    return {module: one for module, one in seen.items() if module not in twice}, notes


def _linears(module: nn.Module, *names: str) -> list[nn.Linear] | None:
    found = [getattr(module, name, None) for name in names]
    return found if all(type(one) is nn.Linear for one in found) else None  # type: ignore[return-value]


def _attention(site: Site, paged: PagedAttention) -> _Attention | None:
    module, keeps = site.module, site.keeps
    parts = _linears(module, "q_proj", "k_proj", "v_proj") or _linears(module, "qkv_proj")
    out = next((found for name in _OUT if (found := _linears(module, name))), None)
    rows = (site.heads + 2 * keeps.num_kv_heads) * keeps.head_dim
    if parts is None or out is None or site.scores.sinks or site.scores.slopes or site.value_dim != keeps.head_dim:
        return None
    if sum(one.out_features for one in parts) != rows:
        return None
    named = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    norms: tuple[torch.Tensor | None, torch.Tensor | None, float] = (None, None, 1e-6)
    if any(one is not None for one in named):
        gains = [None if one is None else gain_of(one) for one in named]
        if gains[0] is None or gains[1] is None or gains[0][1] != gains[1][1] or len(gains[0][0]) != keeps.head_dim:
            return None
        norms = (gains[0][0], gains[1][0], gains[0][1])
    return _Attention(site, _Product(parts), _Product(out), norms, paged)


def _feed_forward(module: nn.Module) -> _FeedForward | None:
    parts = _linears(module, "gate_proj", "up_proj") or _linears(module, "gate_up_proj")
    down, act = _linears(module, "down_proj"), getattr(module, "act_fn", getattr(module, "activation_fn", None))
    if parts is None or down is None or not callable(act):
        return None
    if sum(one.out_features for one in parts) != 2 * down[0].in_features:
        return None
    x = torch.linspace(-6, 6, 61, device=parts[0].weight.device)
    is_silu = _alike(act(x), nn.functional.silu(x))
    return _FeedForward(_Product(parts), _Product(down), None if is_silu else act)


def _layer(module: nn.Module, seen: _Seen, notes: _Notes, kinds: Mapping[nn.Module, Any]) -> _Made | None:
    """Norm, attention, norm, feed-forward, with a sum behind each half."""
    named = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    before, attn, between, mlp = (getattr(module, name, None) for name in named)
    parts = [one for one in module.children() if not isinstance(one, nn.Dropout | nn.Identity)]
    if attn is None or mlp is None or attn not in kinds or mlp not in kinds or len(parts) != len(named):
        return None
    first, second, x = gain_of(before), gain_of(between), seen.rows
    if first is None or second is None or x is None or not isinstance(seen.given, torch.Tensor):
        return None
    attention, feed_forward = kinds[attn], kinds[mlp]
    if not isinstance(attention, _Attention) or not isinstance(feed_forward, _FeedForward):
        return None
    _, _, v = notes.found[attn]
    q, _, ours = attention.heads(x, first, _table(seen))
    if not _alike(ours, v[0].transpose(0, 1)):
        return None
    group = q.shape[1] // ours.shape[1]
    half = attention.out(ours.repeat_interleave(group, 1).flatten(1), residual=x.clone())
    if not _alike(feed_forward.add(half, second, half.clone()), seen.given[0]):
        return None

    def made(x: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        residual = attention.add(x, first, x.clone(), table)
        return feed_forward.add(residual, second, residual)

    return made


def _attends_alike(attention: _Attention, seen: _Seen, noted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> bool:
    x, given = seen.rows, seen.given
    if isinstance(given, tuple):
        if len(given) != 2 or given[1] is not None:
            return False
        given = given[0]
    if x is None or not isinstance(given, torch.Tensor):
        return False
    ours = attention.heads(x, None, _table(seen))
    if not all(_alike(one, theirs[0].transpose(0, 1)) for one, theirs in zip(ours, noted, strict=True)):
        return False
    group = ours[0].shape[1] // ours[2].shape[1]
    return _alike(attention.out(ours[2].repeat_interleave(group, 1).flatten(1)), given[0])


def _turned(args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines that a layer is told, [1, tokens, columns] each."""
    for one in (named.get("position_embeddings"), *args):
        if isinstance(one, tuple) and len(one) == 2 and all(isinstance(part, torch.Tensor) for part in one):
            return one if one[0].dim() == 3 and one[0].shape == one[1].shape else None
    return None


def _table(seen: _Seen) -> torch.Tensor | None:
    told = _turned(seen.args, seen.named)
    return None if told is None else table_of(*told)


def table_of(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As our kernels have it: float32 [tokens, columns], of each pair of columns a cosine, and then their sines."""
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1).float()


def _alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """But for rounding."""
    if ours.shape != theirs.shape:
        return False
    mean, largest = (1e-4, 1e-4) if ours.dtype == torch.float32 else (8e-3, 2e-2)
    found = distance(ours, theirs)
    return found.mean <= mean and found.largest <= largest


# -- putting ours in place ----------------------------------------------------------------------------------------


def _replace(module: nn.Module, door: Door, paged: PagedAttention, made: _Made, *, as_tuple: bool) -> None:
    """While others than the paged cache attend, the class's own code runs."""
    own: Callable[..., Any] = module.forward

    def forward(*args: Any, **named: Any) -> Any:
        x = named.get(_HIDDEN, args[0] if args else None)
        if door.attends is not paged or not isinstance(x, torch.Tensor) or x.dim() != 3:
            return own(*args, **named)
        y = made(x[0], paged.table(_turned(args, named), table_of))[None]
        return (y, None) if as_tuple else y

    vars(module)["forward"] = forward


def _plain_products(causal: nn.Module) -> int:
    """Of linear layers that are nothing else."""
    found = 0
    for module in causal.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            vars(module)["forward"] = partial(_multiplied, module)
            found += 1
    return found


def _multiplied(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != layer.weight.dtype:
        return nn.functional.linear(x, layer.weight, layer.bias)
    return linear(x.reshape(-1, x.shape[-1]), layer.weight, layer.bias).view(*x.shape[:-1], layer.out_features)
