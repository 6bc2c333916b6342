"""Nomic Embed (Nussbaum et al., 2024): BERT with rotary positions and gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.block import PostNormLayer
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import rotary_table
from quire.models.base import Naming
from quire.models.encoder import EMBEDDINGS, EncoderStack, encoder_sizes
from quire.models.encoders import bert

architectures = (
    "NomicBertModel", "NomicBertForMaskedLM", "NomicBertForSequenceClassification", "NomicBertForTokenClassification",
)  # fmt: skip
defaults = {  # as transformers has them
    "vocab_size": 30528,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "head_dim": None,
    "intermediate_size": 3072,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "rope_parameters": None,
}
fixed = {
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "tie_word_embeddings": (True, False, None),
    # Of configs older than transformers' own.
    "causal": (False, None),
    "prenorm": (False, None),
    "parallel_block": (False, None),
    "use_rms_norm": (False, None),
    "qkv_proj_bias": (False, None),
    "mlp_fc1_bias": (False, None),
    "mlp_fc2_bias": (False, None),
    "moe_every_n_layers": (0, None),
    "rotary_emb_fraction": (1.0, 1, None),
    "rotary_emb_interleaved": (False, None),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,),
}
shared = ("num_attention_heads", "intermediate_size")
aliases = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
rotary = {"rope_theta": 1000.0}
unused = bert.unused
GATES = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}  # names of older configs, for the activation of a gate
NAMING = Naming(
    parts={
        **EMBEDDINGS,
        "embedding_norm": "emb_ln",
        "layers": "encoder.layers",
        "self_attn": "attn",
        "o_proj": "out_proj",
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
        "gate_proj": "fc12",
        "up_proj": "fc11",
        "down_proj": "fc2",
    },
    prefix="nomic_bert.",
    is_optional=True,
)


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    sizes, act = encoder_sizes(config), read(str, config, "hidden_act")
    if "rotary_emb_fraction" in config and act not in GATES:
        raise ConfigError(
            f"config.json: activation_function={act!r} is not supported: nomic_bert's layers are made for "
            f"{', '.join(GATES)}",
            "activation_function",
        )
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)

    def layer(index: int) -> PostNormLayer:
        qkv = Linear.qkv(*sizes.attention, bias=False, fused="Wqkv")
        attention = Attention(index, *sizes.attention, cos_sin, qkv=qkv)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=GATES.get(act, act))
        return PostNormLayer(attention, mlp, (LayerNorm(sizes.hidden, sizes.eps), LayerNorm(sizes.hidden, sizes.eps)))

    return EncoderStack(
        sizes,
        layer,
        max_positions,
        naming=NAMING,
        embedding_norm=LayerNorm(sizes.hidden, sizes.eps),
        token_types=read_positive(config, "type_vocab_size"),
    )


classifier = bert.classifier
