"""What families with experts read of config.json alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.kernels.moe.routes import Rule, Scoring
from quire.models.base import DecoderStack, Sizes

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def top_k_rule(
    config: Mapping[str, Any],
    experts_key: str,
    *,
    renormalize: bool | None = None,
    top_k_key: str = "num_experts_per_tok",
) -> Rule:
    """Softmax over all experts, then the best. renormalize: None: as `norm_topk_prob` says.

    Raises ConfigError for more choices than experts.
    """
    if renormalize is None:
        renormalize = read(bool, config, "norm_topk_prob")
    experts, top_k = chosen(config, experts_key, top_k_key)
    return Rule(experts, top_k, renormalize=renormalize)


def grouped_rule(
    config: Mapping[str, Any],
    experts_key: str,
    *,
    scoring: Scoring = "sigmoid",
    group_best: int = 2,
    renormalize: bool | None = None,
) -> Rule:
    """DeepSeek-V3's: sigmoids, a correction for the choice, groups judged by their two best experts.

    renormalize: None: as `norm_topk_prob` says. Raises ConfigError for groups that leave too few experts.
    """
    experts, top_k = chosen(config, experts_key, "num_experts_per_tok")
    groups, top_groups = read_positive(config, "n_group", 1), read_positive(config, "topk_group", 1)
    if experts % groups or top_groups > groups or top_groups * (experts // groups) < top_k:
        raise ConfigError(
            f"config.json: {experts_key}={experts} in n_group={groups}, of which topk_group={top_groups} are open, "
            f"leave no num_experts_per_tok={top_k} to choose",
            "n_group",
        )
    if groups > 1 and experts // groups < group_best:
        raise ConfigError(
            f"config.json: n_group={groups} of {experts_key}={experts}: a group needs two experts", "n_group"
        )
    return Rule(
        experts,
        top_k,
        scoring=scoring,
        renormalize=read(bool, config, "norm_topk_prob", False) if renormalize is None else renormalize,
        scale=read(float, config, "routed_scaling_factor"),
        groups=groups,
        top_groups=top_groups,
        group_best=group_best,
    )


def chosen(config: Mapping[str, Any], experts_key: str, top_k_key: str) -> tuple[int, int]:
    """Numbers of experts, and of those that a token goes to. Raises ConfigError if these are more."""
    experts, top_k = read_positive(config, experts_key), read_positive(config, top_k_key)
    if top_k > experts:
        raise ConfigError(f"config.json: {top_k_key}={top_k} must be <= {experts_key}={experts}", top_k_key)
    return experts, top_k


def sparse_layers(config: Mapping[str, Any], layers: int) -> set[int]:
    """Numbers of the layers that have experts: every `decoder_sparse_step`-th but `mlp_only_layers`.

    Raises ConfigError for numbers that are none.
    """
    step = read_positive(config, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(number) is int and number >= 0 for number in dense):
        raise ConfigError(
            f"config.json: mlp_only_layers must be a list of layers' numbers, got {shown(dense)}", "mlp_only_layers"
        )
    return {index for index in range(layers) if (index + 1) % step == 0} - set(dense)


def later_layers(config: Mapping[str, Any], layers: int) -> set[int]:
    """Numbers of the layers that have experts: all but the first `first_k_dense_replace`."""
    return set(range(min(read_count(config, "first_k_dense_replace", 0), layers), layers))


def typed_layers(config: Mapping[str, Any], layers: int, dense: int) -> set[int]:
    """Numbers of the layers that have experts: as `mlp_layer_types` says, else all but the first `dense`.

    Raises ConfigError for a list that is none.
    """
    kinds = config["mlp_layer_types"]
    if kinds is None:
        kinds = ["dense"] * min(dense, layers) + ["sparse"] * max(layers - dense, 0)
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
        raise ConfigError(
            f"config.json: mlp_layer_types must say dense or sparse for each of num_hidden_layers={layers}, got "
            f"{shown(kinds)}",
            "mlp_layer_types",
        )
    return {index for index, kind in enumerate(kinds) if kind == "sparse"}


class SparseStack(DecoderStack):
    """A decoder whose checkpoints may spell names in another way, or hold more layers than it has.

    renamed: parts of names as checkpoints may have them, and as the modules here do. Layers behind the last one predict
    further tokens (DeepSeek-V3, 2024), which is not done here: they are left out. more: see `DecoderStack`.
    """

    def __init__(
        self,
        sizes: Sizes,
        layer: Callable[[int], nn.Module],
        *,
        renamed: Mapping[str, str] = MappingProxyType({}),
        **more: Any,
    ) -> None:
        super().__init__(sizes, layer, **more)
        self._renamed = renamed

    def known_name(self, tensor: str) -> str | None:
        number = _LAYER.match(tensor)
        if number and int(number[1]) >= self.sizes.layers:
            return None
        for theirs, ours in self._renamed.items():
            tensor = tensor.replace(theirs, ours)
        return super().known_name(tensor)

    def other_names(self, module: str) -> tuple[str, ...]:
        pairs = [(theirs.strip("."), ours.strip(".")) for theirs, ours in self._renamed.items()]
        told = (f".{module}.".replace(f".{ours}.", f".{theirs}.").strip(".") for theirs, ours in pairs)
        renamed = tuple(dict.fromkeys(name for name in told if name != module))
        return (
            *renamed,
            *(other for name in (module, *renamed) for other in super(SparseStack, self).other_names(name)),
        )
