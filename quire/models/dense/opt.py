"""OPT: learned positions that begin at 2, ReLU, layer norms before each half or behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer, PostNormLayer
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, NoNorm
from quire.layers.rotary import no_rotation
from quire.models.base import DecoderStack, Naming, Sizes, learned_positions

architectures = ("OPTForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 50272,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "relu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "word_embed_proj_dim": None,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
aliases = {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}
shared = ("num_attention_heads", "intermediate_size")
NAMING = Naming(
    parts={
        "o_proj": "out_proj",
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        "mlp": "",
        "up_proj": "fc1",
        "down_proj": "fc2",
        "norm": "final_layer_norm",
    },
    prefix="model.decoder.",
)


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes, act = Sizes.read({**config, "eps": 1e-5}, "eps"), read(str, config, "hidden_act")
    if read_positive(config, "word_embed_proj_dim", sizes.hidden) != sizes.hidden:
        raise ConfigError(
            f"config.json: word_embed_proj_dim must be hidden_size={sizes.hidden}: embeddings of another size are not "
            f"supported, got {config['word_embed_proj_dim']}",
            "word_embed_proj_dim",
        )
    still, bias = no_rotation(max_positions, sizes.head_dim), read(bool, config, "enable_bias")
    before, is_affine = read(bool, config, "do_layer_norm_before"), read(bool, config, "layer_norm_elementwise_affine")
    has_last = before and not read(bool, config, "_remove_final_layer_norm")

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps, weight=is_affine, bias=is_affine)

    def layer(index: int) -> DecoderLayer | PostNormLayer:
        attention = Attention(index, *sizes.attention, still, qkv_bias=bias, out_bias=bias)
        mlp = MLP(sizes.hidden, sizes.intermediate, act, bias=bias, key="activation_function")
        if before:
            return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))
        return PostNormLayer(attention, mlp, (norm(), norm()))

    return DecoderStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        norm=norm() if has_last else NoNorm(),
        naming=NAMING,
        positions=learned_positions(config, max_positions, first=2),
    )
