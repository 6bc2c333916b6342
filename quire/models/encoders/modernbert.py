"""ModernBERT (Warner et al., 2024): norms before, rotary positions, gates, and windows in two of three layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.encoder import Dense, HeadLayer, HeadNorm
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import LayerNorm, NoNorm
from quire.layers.rotary import rotary_table
from quire.models.base import Naming
from quire.models.encoder import EncoderStack, encoder_sizes
from quire.models.window import layer_windows

architectures = (
    "ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification", "ColBERTModernBertModel",
)  # fmt: skip
defaults = {  # as transformers has them
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_bias": True,
    "local_attention": 128,
    "layer_types": None,
    "global_attn_every_n_layers": None,
    "rope_parameters": None,
    "classifier_pooling": "cls",
    "classifier_bias": False,
    "classifier_activation": "gelu",
}
fixed = {
    "is_encoder_decoder": (False, None),
    "tie_word_embeddings": (True, None),
    "position_embedding_type": ("absolute", None),  # which means nothing
    "rope_scaling": (None,),
}
shared = ("num_attention_heads", "intermediate_size")
aliases = {"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"}
rotary = {"full_attention": {"rope_theta": 160000.0}, "sliding_attention": {"rope_theta": 10000.0}}
unused = r"head\.|decoder\."  # of the pre-training
NAMING = Naming(
    parts={
        "embed_tokens": "embeddings.tok_embeddings",
        "embedding_norm": "embeddings.norm",
        "input_layernorm": "attn_norm",
        "self_attn": "attn",
        "o_proj": "Wo",
        "post_attention_layernorm": "mlp_norm",
        "down_proj": "Wo",
        "norm": "final_norm",
    },
    is_optional=True,
)


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    sizes = encoder_sizes(config, "norm_eps")
    every = read_positive(config, "global_attn_every_n_layers", 3)
    usual = ["sliding_attention" if index % every else "full_attention" for index in range(sizes.layers)]
    kinds = config["layer_types"] or usual
    window = {"sliding_window": read_positive(config, "local_attention") // 2, "layer_types": kinds}
    windows = layer_windows(window, sizes.layers, max_positions)
    tables = {kind: rotary_table(config, sizes.head_dim, max_positions, kind) for kind in set(kinds)}
    bias, mlp_bias = read(bool, config, "attention_bias"), read(bool, config, "mlp_bias")
    act, norm_bias = read(str, config, "hidden_activation"), read(bool, config, "norm_bias")

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps, bias=norm_bias)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(
            index,
            *sizes.attention,
            tables[kinds[index]],
            window=windows[index],
            qkv=Linear.qkv(*sizes.attention, bias=bias, fused="Wqkv"),
            out_bias=bias,
        )
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, bias=mlp_bias, act=act, fused="Wi")
        norms = (norm() if index else NoNorm(), norm())
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=norms)

    return EncoderStack(sizes, layer, max_positions, naming=NAMING, embedding_norm=norm(), norm=norm())


def transform(config: Mapping[str, Any]) -> list[HeadLayer]:
    """What stands before the last layer of any head."""
    sizes, act = encoder_sizes(config, "norm_eps"), read(str, config, "classifier_activation")
    dense = Dense("head.dense", sizes.hidden, sizes.hidden, bias=read(bool, config, "classifier_bias"), act=act)
    return [dense, HeadNorm("head.norm", sizes.hidden, sizes.eps, bias=read(bool, config, "norm_bias"))]


def classifier(config: Mapping[str, Any], architecture: str, num_labels: int) -> list[HeadLayer]:  # noqa: ARG001
    return [*transform(config), Dense("classifier", read_positive(config, "hidden_size"), num_labels, bias=True)]


def vocabulary_head(config: Mapping[str, Any]) -> tuple[list[HeadLayer], str]:
    if not read(bool, config, "decoder_bias"):
        raise ConfigError("config.json: decoder_bias=false is not supported for SPLADE", "decoder_bias")
    return transform(config), "decoder"
