"""Mixtures of experts: of many feed-forward layers each token goes through the few that a router chooses for it.

The experts' matrices are kept as two, one line of experts each: gate and up together [experts, 2 · inner, hidden] (of
experts without a gate, up alone), and down [experts, hidden, inner], in the weight format of the model. Ranks share
every expert, by `inner`, or have some whole (`layers/spread.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.distributed.group import Group
from quire.distributed.topology import ALONE, Topology
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm.fp8_linear import Fp8Rows, rms_norm_both
from quire.kernels.moe.experts import add_each_with, norms_inside, takes_shared
from quire.kernels.moe.gate import sigmoid_gate
from quire.kernels.moe.inside import USUAL, Inside, Shared
from quire.kernels.moe.inside import Gate as Gate  # for families
from quire.kernels.moe.router import router_logits
from quire.kernels.moe.routing import Here, Live, Routes, route
from quire.kernels.moe.routing import Rule as Rule  # for families
from quire.kernels.summands import Summands
from quire.layers.attention import SelfAttention
from quire.layers.block import DecoderLayer, OuterNormLayer
from quire.layers.linear import Linear
from quire.layers.low_rank import LowRankExperts
from quire.layers.may_be_packed import MayBePacked
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.norm import Next, Norm, RMSNorm, add_over_ranks
from quire.layers.spread import Spread
from quire.layers.targets import Staged, Staging, Target, store
from quire.quantization.base import (
    INPUTS,
    OUTPUTS,
    ExpertMatrices,
    QuantizationMethod,
    Source,
    Spec,
    Tensors,
    WeightFormat,
)
from quire.quantization.base import Norm as Gain

Shapes = Mapping[str, tuple[int, ...]]
"""Of the tensors that a checkpoint has."""
_DRAWN_AT_ONCE = 1 << 25  # numbers of random weights: one expert's matrix at a time is mostly launches


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What checkpoints call an expert's matrices, behind `experts.N.`; and all experts' in one tensor each, [experts,
    outputs, inputs] with gate and up stacked, behind `experts.`, for those that store them so.

    Biases, of experts that have them, are always together: [experts, outputs].
    transposed: together they are [experts, inputs, outputs]. interleaved: outputs of gate and up take turns, in biases
    too.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    all_gate_up: str = "gate_up_proj"
    all_down: str = "down_proj"
    gate_up_bias: str = "gate_up_proj_bias"
    down_bias: str = "down_proj_bias"
    transposed: bool = False
    interleaved: bool = False


class Router(MayBePacked):
    """Logits of the experts, plain in every model and whole on every rank.

    correction: what checkpoints call the bias [experts] that takes part in the choice alone, if they have one.
    lines: 1 if checkpoints have that as [1, experts]. bias: there is one of the logits. dtype: of the weight and of the
    product, by default the model's.
    """

    def __init__(
        self,
        hidden: int,
        rule: Rule,
        *,
        correction: str | None = None,
        lines: int = 0,
        bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rule, self.correction = rule, correction
        self.bias = nn.Parameter(torch.empty(rule.experts, dtype=dtype), requires_grad=False) if bias else None
        self.weight = nn.Parameter(torch.empty(rule.experts, hidden, dtype=dtype), requires_grad=False)
        if correction is not None:
            shape = (lines, rule.experts) if lines else (rule.experts,)
            self.register_parameter(
                correction, nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
            )

    def forward(self, x: torch.Tensor, live: Live | None, norm: Gain | None = None, here: Here | None = None) -> Routes:
        """x [tokens, hidden], or norm(x) → where its tokens go. here: see `route`."""
        low_rank = self.low_rank if self.low_rank is not None and self.low_rank.is_active else None
        if norm is not None and (low_rank is not None or x.dtype != self.weight.dtype):
            x, norm = rms_norm(x, *norm), None
        logits = router_logits(x.to(self.weight.dtype), self.weight, norm, self.bias)
        if low_rank is not None:
            logits = low_rank.expand(logits, low_rank.shrink(x), self.bias)
        bias = getattr(self, self.correction) if self.correction else None
        return route(logits, self.rule, bias, live, here)


class Experts(nn.Module):
    """The matrices of all routed experts. It has no parameters before `allocate`.

    gate: what stands between an expert's products. bias: both have one.
    """

    matrices: ExpertMatrices
    low_rank: LowRankExperts | None = None  # what adapters add, if there may be any

    def __init__(
        self,
        rule: Rule,
        hidden: int,
        inner: int,
        names: ExpertNames | None = None,
        gate: Gate = Gate(),  # noqa: B008 (it is frozen)
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.has_bias, self.inside = bias, Inside(gate)
        self.experts, self.top_k, self.names = rule.experts, rule.top_k, names or ExpertNames()
        parts = {self.names.up: inner} if gate.squared else {self.names.gate: inner, self.names.up: inner}
        gate_up = Linear(hidden, sum(parts.values()), bias=False, parts=parts, gated=not gate.squared, role="rows")
        # One expert's, as patterns: of shares, formats and targets. In a tuple, so that they are no layers.
        self._pair = (gate_up, Linear(inner, hidden, bias=False, parts={self.names.down: hidden}, role="columns"))

    def allocate(
        self, method: QuantizationMethod, name: str, topology: Topology = ALONE, group: Group | None = None
    ) -> None:
        """Make the parameters, in the default dtype and on the default device. name: what checkpoints call this module.
        group: of the ranks that share them.

        Raises ConfigError if ranks cannot share them.
        """
        self.name, self.ranks = name, group
        self.spread: Spread | None = None
        if topology.whole_experts and topology.size > 1:
            self.spread = Spread(self.experts, topology, topology.redundant_experts, torch.empty(0).device)
            topology, group = ALONE, None
        self._kept: list[dict[str, torch.Tensor]] = []
        for kind, one in zip(("gate_up", "down"), self._pair, strict=True):
            with torch.device("meta"):
                one.allocate(method, tuple(f"{name}.0.{part}" for part in one.parts), topology, group)
            specs = one.scheme.format.tensors(*one.local_shape, one.dtype)
            kept = {}
            for tensor, spec in specs.items():
                whole = torch.empty((len(self.own), *spec.shape), dtype=spec.dtype)
                self.register_parameter(f"{kind}_{tensor}", nn.Parameter(whole, requires_grad=False))
                kept[tensor] = whole
            self._kept.append(kept)
        gate_up, down = (one.scheme.format for one in self._pair)
        self.matrices = gate_up.experts(self._kept[0], self._kept[1], down)
        if self.has_bias:
            self._biases = [torch.zeros(len(self.own), one.local_shape[0]) for one in self._pair]
            for kind, bias in zip(("gate_up", "down"), self._biases, strict=True):
                self.register_parameter(f"{kind}_bias", nn.Parameter(bias, requires_grad=False))
            # What is added behind a sum over ranks is added once.
            self.inside = Inside(self.inside.gate, self._biases[0], self._biases[1] if not topology.rank else None)

    @property
    def whole_weights(self) -> int:
        """Numbers of all experts' matrices, on all ranks together; known before `allocate`."""
        return self.experts * sum(one.whole_weights for one in self._pair)

    @property
    def own(self) -> Sequence[int]:
        """Experts that this rank has, or has a part of, in the order of its tensors' lines."""
        return range(self.experts) if self.spread is None else self.spread.own

    def rebalance(self, group: Group) -> bool:
        """Let ranks have the experts that spread the tokens which came since the last time more evenly. All ranks call
        it together, between steps. Returns whether any has moved."""
        spread = self.spread
        wanted = None if spread is None else spread.rebalanced()
        if spread is None or wanted is None:
            return False
        before, rank = spread.placement, group.topology.rank
        slots = {expert: slot for slot, expert in enumerate(spread.own)}
        lines = [parameter.data for parameter in self.parameters(recurse=False)]
        moved = sorted({one for old, new in zip(before, wanted, strict=True) for one in set(new) - set(old)})
        come: dict[int, list[torch.Tensor]] = {}
        for expert in moved:
            source = next(number for number, own in enumerate(before) if expert in own)
            sent = [
                (line[slots[expert]] if rank == source else torch.empty_like(line[0])).contiguous() for line in lines
            ]
            arrived = [group.from_rank(tensor, source) for tensor in sent]
            if expert in wanted[rank] and expert not in slots:
                come[expert] = arrived
        kept = {one: [line[slots[one]].clone() for line in lines] for one in wanted[rank] if one in slots}
        for slot, expert in enumerate(wanted[rank]):
            for line, numbers in zip(lines, come.get(expert) or kept[expert], strict=True):
                line[slot].copy_(numbers)
        spread.place(wanted)
        return True

    @property
    def format(self) -> WeightFormat:
        """Of all its matrices, once they are allocated."""
        return self._pair[0].scheme.format

    def num_weights(self) -> int:
        """Numbers that the parameters of a token's experts stand for: what it is multiplied by here."""
        every = self.top_k * sum(one.num_weights() for one in self._pair)
        return every * len(self.own) // self.experts

    def num_bytes(self, tokens: int | None = None) -> float:
        """Of the parameters; of those of the experts that so many tokens hit, if they choose evenly."""
        every = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())
        return every if tokens is None else every * (1 - (1 - self.top_k / self.experts) ** tokens)

    def fill(self, draw: Callable[[int, int], torch.Tensor]) -> None:
        """draw: (rows, columns) → numbers of experts' matrices, one below the other, of all ranks."""
        slots = {expert: slot for slot, expert in enumerate(self.own)}
        for one, kept in zip(self._pair, self._kept, strict=True):
            size = one.out_features * one.in_features
            many = max(1, _DRAWN_AT_ONCE // size)
            for first in range(0, self.experts, many):
                count = min(many, self.experts - first)
                drawn = draw(count * one.out_features, one.in_features).split(one.out_features)
                for expert, whole in enumerate(drawn, first):
                    if (slot := slots.get(expert)) is not None:
                        own = {name: tensor[slot] for name, tensor in kept.items()}
                        store(own, one.scheme.format.pack(one.cut(whole)))

    @property
    def pair(self) -> tuple[Linear, Linear]:
        """One expert's matrices, gate and up together and down, as patterns of shapes and shares."""
        return self._pair

    def told_slot(self, expert: int) -> int | None:
        """Where an expert is of whose numbers this rank tells the others; None: another rank has it, and tells. Of an
        expert that ranks share each tells of its part."""
        if self.spread is None:
            return expert
        return self.spread.own.index(expert) if self.spread.is_first_with(expert) else None

    def dense(self, number: int, slot: int, dtype: torch.dtype) -> torch.Tensor:
        """What the numbers of one of its experts' matrices stand for, as this rank has them. number: in `pair`."""
        own = {name: tensor[slot] for name, tensor in self._kept[number].items()}
        return self._pair[number].scheme.format.matrix(own, None).dense(dtype)

    @property
    def rounds_rows(self) -> bool:
        """Whether what many tokens are multiplied by is rounded, and normed on the way."""
        return self.matrices.takes_narrow

    @property
    def takes_narrow(self) -> bool:
        """Whether x is wanted in 8 bits as well, if it is not too few rows."""
        return self.matrices.takes_narrow and (self.low_rank is None or not self.low_rank.is_active)

    def add(
        self,
        x: torch.Tensor,
        routes: Routes,
        residual: torch.Tensor | None,
        norm: Gain | None = None,
        narrow: Fp8Rows | None = None,
    ) -> torch.Tensor:
        """As ExpertMatrices.add, and what adapters add to each expert."""
        if self.low_rank is None or not self.low_rank.is_active:
            return self.matrices.add(x, routes, residual, norm, self.inside, narrow)
        x = x if norm is None else rms_norm(x, *norm)
        gate_up, down = (partial(self.dense, number, dtype=x.dtype) for number in range(2))
        low_rank = self.low_rank
        own = None if self.spread is None else torch.tensor(self.own, device=x.device)

        def first(slots: torch.Tensor, tokens: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return low_rank.add_gate_up(slots.long() if own is None else own[slots], tokens, y, x)

        def second(slots: torch.Tensor, tokens: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return low_rank.add_down(slots.long() if own is None else own[slots], tokens, y, x)

        return add_each_with(x, routes, gate_up, down, residual, self.inside, (first, second))

    def summands(
        self, x: torch.Tensor, routes: Routes, norm: Gain | None = None, narrow: Fp8Rows | None = None
    ) -> torch.Tensor | Summands:
        """The same without a residual, for who adds it up anyway."""
        if self.low_rank is None or not self.low_rank.is_active:
            return self.matrices.summands(x, routes, norm, self.inside, narrow)
        return self.add(x, routes, None, norm, narrow)

    # -- loading ------------------------------------------------------------------------------------------------

    def targets_in(self, stored: Shapes) -> Iterator[Target]:
        """Of every tensor that a checkpoint has for them, be it one an expert or one for all."""
        if self.has_bias:
            yield from self._bias_targets(stored)
        are_turned = self._are_turned(stored)
        for one, kept, whole in zip(self._pair, self._kept, (self.names.all_gate_up, self.names.all_down), strict=True):
            together = f"{self.name}.{whole}"
            if any(_stored_as(together, source) in stored for source in one.scheme.sources):
                for slot, expert in enumerate(self.own):
                    own = {name: tensor[slot] for name, tensor in kept.items()}
                    yield from self._part_of(together, expert, one, own, are_turned=are_turned)
                continue
            slots = {expert: slot for slot, expert in enumerate(self.own)}
            for expert in range(self.experts):
                modules = tuple(f"{self.name}.{expert}.{part}" for part in one.parts)
                own = {name: tensor[slots.get(expert, 0)] for name, tensor in kept.items()}
                for target in one.targets_into(modules, own):
                    yield target if expert in slots else replace(target, is_elsewhere=True)

    def _are_turned(self, stored: Shapes) -> bool:
        """Whether files have all experts' matrices the other way round: by the family's word, or the shape of `down`.

        Gates and ups together may be square.
        """
        down = self._pair[1]
        shape = (self.experts, down.out_features, down.in_features)
        found = stored.get(f"{self.name}.{self.names.all_down}", shape)
        return self.names.transposed or (found != shape and found == (shape[0], shape[2], shape[1]))

    def _part_of(
        self, together: str, expert: int, one: Linear, own: dict[str, torch.Tensor], *, are_turned: bool
    ) -> Iterator[Target]:
        """One expert's part of tensors that hold all of them: of every source whose first axis counts outputs."""
        sources, pack = one.scheme.sources, one.scheme.pack
        if any(source.axes[:1] != (OUTPUTS,) for source in sources):
            return
        dealt = self.names.interleaved and len(one.parts) == 2
        if dealt:
            pack = partial(_deal, pack=one.scheme.pack)
        staging = None
        if pack is not None:
            specs = {source.name: Spec(one.staged_shape(source), source.kept) for source in sources}
            staging = Staging(specs, next(iter(own.values())).device, pack, own)
        for source in sources:
            into = own[source.name] if staging is None else Staged(staging, source.name)
            turned = are_turned and source.axes == (OUTPUTS, INPUTS)
            shape, columns = one.inner_axes(source)
            shape = (self.experts, one.out_features, *shape)
            name = _stored_as(together, source)
            for lines, place in _runs(one, dealt=dealt):
                part, at = (slice(expert, expert + 1), lines, *columns), (None, place)
                if turned:
                    part, shape = (part[0], *columns, lines), (self.experts, one.in_features, one.out_features)
                yield Target(name, shape, into, source.dtypes, part, at, turned)

    def _bias_targets(self, stored: Shapes) -> Iterator[Target]:
        """Gates' and ups' may be tensors of their own, called as their matrices."""
        names = (self.names.gate_up_bias, self.names.down_bias)
        for one, bias, name in zip(self._pair, self._biases, names, strict=True):
            whole = f"{self.name}.{name}"
            dealt = self.names.interleaved and len(one.parts) == 2
            runs = _turns(one) if dealt else _runs(one, dealt=False)
            found = [(whole, one.out_features, lines, place) for lines, place in runs]
            singles = [f"{self.name}.{part}_bias" for part in one.parts]
            if singles[0] in stored:
                apart = zip(singles, one.parts.values(), _apart(one), strict=True)
                found = [(single, rows, lines, place) for single, rows, (lines, place) in apart]
            for stored_as, rows, lines, place in found:
                for slot, expert in enumerate(self.own):
                    part, at = (slice(expert, expert + 1), lines), (slice(slot, slot + 1), place)
                    yield Target(stored_as, (self.experts, rows), bias, part=part, at=at)


def _runs(one: Linear, *, dealt: bool) -> Iterator[tuple[slice, slice]]:
    """Of stored lines of gate and up, or of another matrix: those of this rank, and where they go; in as few pieces as
    may be. dealt: theirs take turns."""
    parts = list(zip(one.parts.values(), one.shares, strict=True))
    if dealt or all(share.end - share.begin == rows for rows, share in parts):
        share, step = one.shares[0], len(parts)
        yield slice(step * share.begin, step * share.end), slice(0, step * (share.end - share.begin))
        return
    first = place = 0
    for rows, share in parts:
        yield slice(first + share.begin, first + share.end), slice(place, place + share.end - share.begin)
        first, place = first + rows, place + share.room


def _apart(one: Linear) -> Iterator[tuple[slice, slice]]:
    """The same of parts that are stored by themselves."""
    place = 0
    for share in one.shares:
        yield slice(share.begin, share.end), slice(place, place + share.end - share.begin)
        place += share.room


def _turns(one: Linear) -> Iterator[tuple[slice, slice]]:
    """The same of gate and up that take turns, where one is to stand behind the other."""
    for which, share in enumerate(one.shares):
        at = which * share.room
        yield slice(2 * share.begin + which, 2 * share.end, 2), slice(at, at + share.end - share.begin)


def _deal(read: Tensors, pack: Callable[[Tensors], Tensors] | None) -> Tensors:
    """Lines of gate and up that take turns, one kind behind the other; then packed."""
    dealt = {name: tensor.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) for name, tensor in read.items()}
    return dealt if pack is None else pack(dealt)


def _stored_as(together: str, source: Source) -> str:
    """The name of a tensor that holds a source of all experts."""
    return together if source.name == "weight" else f"{together}_{source.name}"


class SparseLayer(DecoderLayer):
    """A decoder layer whose feed-forward part may be a mixture of experts: tokens that are nobody's go to none.

    scale: that what a half adds is multiplied by, in layers with experts. norms: see `DecoderLayer`.
    """

    def __init__(
        self,
        self_attn: SelfAttention,
        mlp: GatedMLP | MixtureOfExperts,
        hidden: int,
        eps: float,
        *,
        scale: float = 1.0,
        norms: tuple[Norm, Norm] | None = None,
    ) -> None:
        super().__init__(self_attn, mlp, hidden, eps, norms=norms)
        self.scale = scale

    def forward(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        if not isinstance(self.mlp, MixtureOfExperts):
            return super().forward(residual, ctx)
        live = living(ctx)
        if self.scale == 1.0:
            residual = self.self_attn(residual, self.input_layernorm, ctx)
            for tokens, rows in ctx.pieces(residual):
                self.mlp.add(rows, self.post_attention_layernorm, rows, live and live.of(tokens))
            return residual
        residual.add_(self.self_attn.attend(residual, self.input_layernorm, ctx), alpha=self.scale)
        return residual.add_(self.mlp.add(residual, self.post_attention_layernorm, None, live), alpha=self.scale)

    @property
    def takes_pieces(self) -> bool:
        return self.scale == 1.0 and super().takes_pieces


class SparseOuterNormLayer(OuterNormLayer):
    """The same where what either half adds is normed."""

    def feed(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        if not isinstance(self.mlp, MixtureOfExperts):
            return super().feed(residual, ctx)
        return self.mlp.add(residual, self.pre_feedforward_layernorm, None, living(ctx))


def living(ctx: StepContext) -> Live | None:
    """The tokens of a step that are somebody's; None: nothing says which."""
    return ctx.live


class SharedGate(MayBePacked):
    """How much of the shared expert a token gets: sigmoid(x · weight)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden), requires_grad=False)

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y [tokens, n] times that of x [tokens, hidden], in place; returns y."""
        if self.low_rank is None or not self.low_rank.is_active:
            return sigmoid_gate(y, x, self.weight)
        logits = (x.float() @ self.weight[0].float())[:, None]
        return y.mul_(self.low_rank.expand(logits, self.low_rank.shrink(x), None).sigmoid())


class MixtureOfExperts(nn.Module):
    """Routed experts, and shared ones that every token goes through.

    Submodules are named as in checkpoints: `gate` (the router), `experts`, and `shared_name`, if `shared` is not 0: the
    inner size of the shared experts, which are one feed-forward layer. shared_gate: the name of the gate before them.
    shared_fused: what checkpoints call gate and up of the shared ones if they have them as one.
    latent: what routed experts see is projected to, and what they make back from. gate, bias: of the experts; the
    shared ones have none where these have none. scales_input: a token's weight multiplies what goes to its one
    expert, not what comes out.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        router: Router,
        *,
        names: ExpertNames | None = None,
        shared: int = 0,
        shared_name: str = "shared_experts",
        shared_gate: str | None = None,
        shared_bias: bool = False,
        shared_fused: str = "",
        gate: Gate = Gate(),  # noqa: B008 (it is frozen)
        bias: bool = False,
        scales_input: bool = False,
        latent: int | None = None,
        latent_bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate, self.scales_input = router, scales_input
        self.experts = Experts(router.rule, latent or hidden, inner, names, gate, bias=bias)
        self.fc1_latent_proj = Linear(hidden, latent, bias=latent_bias) if latent else None
        self.fc2_latent_proj = Linear(latent, hidden, bias=latent_bias) if latent else None
        self._shared_name, self._gate_name = shared_name if shared else None, shared_gate
        if shared and gate.squared:
            self.add_module(shared_name, MLP(hidden, shared, "relu2", bias=shared_bias))
        elif shared:
            self.add_module(shared_name, GatedMLP(hidden, shared, bias=shared_bias, fused=shared_fused))
        if shared_gate is not None:
            self.add_module(shared_gate, SharedGate(hidden))
        self.group: Group | None = None
        self.next: Next | None = None

    def join(self, group: Group) -> None:
        """Be the share of one of several ranks, which add their parts up."""
        self.group = group

    @property
    def adding(self) -> MixtureOfExperts | None:
        """What adds to the residual stream."""
        return self if self.fc2_latent_proj is None else None

    def forward(self, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """`residual += experts(norm(residual))` in place, [tokens, hidden]; returns it."""
        return self.add(residual, norm, residual)

    def add(
        self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, live: Live | None = None
    ) -> torch.Tensor:
        """`residual += experts(norm(x))` in place; without a residual, experts(norm(x)). live: None, all tokens are."""
        inside: Gain | None = None
        narrow: Fp8Rows | None = None
        are_few = norms_inside(x, self.gate.rule)
        as_it_is = not self.scales_input and self.fc1_latent_proj is None
        beside = self._beside() if as_it_is and takes_shared(x, self.gate.rule) else None
        if as_it_is and isinstance(norm, RMSNorm) and are_few and (beside is not None or self._shared_name is None):
            inside = (norm.weight, norm.eps)
        elif as_it_is and isinstance(norm, RMSNorm) and not are_few and len(x) and self.experts.takes_narrow:
            x, narrow = rms_norm_both(x, norm.weight, norm.eps)
        elif norm is not None:
            x = norm(x)
        spread = self.experts.spread
        routes, routed = self.gate(x, live, inside, None if spread is None else spread.here), x
        if self.scales_input:
            routed = (x * routes.weights).to(x.dtype)
            routes = routes._replace(weights=torch.ones_like(routes.weights))
        if self.fc1_latent_proj is not None and self.fc2_latent_proj is not None:
            into = self._add_shared(x, torch.zeros_like(x) if residual is None else residual)
            routed = self.fc1_latent_proj(x)
            y: torch.Tensor = self.fc2_latent_proj(
                self.experts.add(routed, routes, torch.zeros_like(routed)), residual=into
            )
            return y
        partial = residual if self.group is None else None
        if self._shared_name is not None and beside is None:
            partial = self._add_shared(x, torch.zeros_like(x) if partial is None else partial)
        own: torch.Tensor | Summands
        if beside is None and partial is None:
            own = self.experts.summands(routed, routes, inside, narrow)
        elif beside is None:
            own = self.experts.add(routed, routes, partial, inside, narrow)
        else:
            own = self.experts.matrices.add_with(beside, routed, routes, partial, inside)
        if self.group is None:
            return own if isinstance(own, torch.Tensor) else own.sum()
        return add_over_ranks(own, residual, self.group, self.next)

    def _beside(self) -> Shared | None:
        """The shared experts, to go along with the others; None: there are none, or they must go by themselves."""
        if self._shared_name is None:
            return None
        shared, experts = self.get_submodule(self._shared_name), self.experts
        if not isinstance(shared, GatedMLP) or shared.act is not None or experts.inside != USUAL:
            return None
        pair = (shared.gate_up_proj, shared.down_proj)
        opens = None if self._gate_name is None else self.get_submodule(self._gate_name)
        adapted = (getattr(one, "low_rank", None) for one in (experts, *pair, opens))
        if any(low_rank is not None and low_rank.is_active for low_rank in adapted):
            return None
        gate = None if opens is None else opens.get_parameter("weight")
        return experts.matrices.beside(pair[0].matrix, pair[1].matrix, gate)

    def _add_shared(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self._shared_name is None:
            return residual
        shared = self.get_submodule(self._shared_name)
        if isinstance(shared, MLP):
            return shared.down_proj.partial(shared.act_fn(shared.up_proj(x)), residual)
        assert isinstance(shared, GatedMLP)
        if self._gate_name is None:
            inner = shared.gate_up_proj(x, reader=shared.down_proj)
        else:
            inner = shared.gate_up_proj(x)
            self.get_submodule(self._gate_name)(inner, x)
        return shared.down_proj.partial(inner, residual)
