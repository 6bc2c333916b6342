"""Gemma 3n, the text alone: several residual streams, vectors of each token's own for every layer, and late layers that
attend to what earlier ones keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.layers.altup import AltUpLayer, ShutGatedMLP, Streams
from quire.layers.attention import Attention, QKNorm
from quire.layers.borrowed_attention import BorrowedAttention
from quire.layers.embedding import rounded
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm, UnitNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Logits, Sizes
from quire.models.streams import StreamsStack
from quire.models.window import layer_windows, sliding_layers

architectures = ("Gemma3nForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
    "activation_sparsity_pattern": None,
}
fixed = {
    "hidden_activation": ("gelu_pytorch_tanh", "gelu_new", "gelu", "relu"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
rotary = {"full_attention": {"rope_theta": 1000000.0}, "sliding_attention": {"rope_theta": 10000.0}}
PATTERN = 5


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    """Layers that borrow are the last ones, each of the last of its kind before them."""
    inner = _by_layer(config, "intermediate_size", int)
    sizes = Sizes.read({**config, "intermediate_size": inner[0]})
    shut, act = _by_layer(config, "activation_sparsity_pattern", float), read(str, config, "hidden_activation")
    windows = layer_windows(config, sizes.layers, max_positions, pattern=PATTERN)
    slides = sliding_layers(config, sizes.layers, PATTERN)
    tables = [rotary_table(config, sizes.head_dim, max_positions, f"{kind}_attention") for kind in ("full", "sliding")]
    bias, streams = read(bool, config, "attention_bias"), _streams(config)
    keeping = sizes.layers - read_count(config, "num_kv_shared_layers")
    keeping = keeping if keeping > 0 else sizes.layers
    lenders: dict[bool, Attention] = {}

    def attention(index: int) -> Attention | BorrowedAttention:
        cos_sin, slides_here = tables[slides[index]], slides[index]
        if index >= keeping:
            if slides_here not in lenders:
                raise ConfigError(
                    f"config.json: num_kv_shared_layers={sizes.layers - keeping} leaves layer {index} no earlier one "
                    "of its kind",
                    "num_kv_shared_layers",
                )
            return BorrowedAttention(lenders[slides_here], sizes.hidden, cos_sin, sizes.eps, bias=bias)
        norms = QKNorm(RMSNorm(sizes.head_dim, sizes.eps), RMSNorm(sizes.head_dim, sizes.eps))
        lenders[slides_here] = Attention(
            index, *sizes.attention, cos_sin, window=windows[index], qkv_bias=bias, out_bias=bias, qk_norm=norms,
            scale=1.0, v_norm=UnitNorm(sizes.head_dim, sizes.eps),
        )  # fmt: skip
        return lenders[slides_here]

    def layer(index: int) -> AltUpLayer:
        mlp = GatedMLP(sizes.hidden, inner[index], act=act)
        if shut[index] > 0:
            mlp = ShutGatedMLP(sizes.hidden, inner[index], act, shut[index])
        return AltUpLayer(attention(index), mlp, streams, sizes.hidden, sizes.eps, act)

    cap = read(float, config, "final_logit_softcapping", 0.0)
    words = read_positive(config, "vocab_size_per_layer_input")
    tied = read(bool, config, "tie_word_embeddings")
    return StreamsStack(
        sizes, layer, streams, words, tied=tied, logits=Logits(softcap=cap), embedding_scale=rounded(sizes.hidden**0.5)
    )


def _streams(config: Mapping[str, Any]) -> Streams:
    count, active = read_positive(config, "altup_num_inputs"), read_count(config, "altup_active_idx")
    if active >= count:
        raise ConfigError(
            f"config.json: altup_active_idx={active} must be < altup_num_inputs={count}", "altup_active_idx"
        )
    return Streams(
        count, active, read(bool, config, "altup_correct_scale"), read_positive(config, "hidden_size_per_layer_input"),
        read_positive(config, "laurel_rank"),
    )  # fmt: skip


def _by_layer(config: Mapping[str, Any], key: str, kind: type) -> Sequence[Any]:
    """A number for each layer, or one for all. Raises ConfigError for what is neither."""
    layers, told = read_positive(config, "num_hidden_layers"), config[key]
    if told is None:  # of gates that are shut
        count = 10 if layers > 10 else 0
        told = [0.95] * count + [0.0] * (layers - count)
    each = told if isinstance(told, list) else [told] * layers
    if len(each) != layers:
        raise ConfigError(f"config.json: {key} must have a number for each of {layers} layers, got {shown(told)}", key)
    if kind is int:
        return [read_positive({key: number}, key) for number in each]
    if not all(isinstance(number, int | float) and 0 <= number < 1 for number in each):
        raise ConfigError(f"config.json: {key} must be shares in [0, 1), got {shown(told)}", key)
    return [float(number) for number in each]
