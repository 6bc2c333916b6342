"""GTE v1.5 (Zhang et al., 2024), as Snowflake's Arctic-Embed v2.0 medium: BERT with rotary positions and gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count
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
    "NewModel", "NewForMaskedLM", "NewForSequenceClassification", "NewForTokenClassification", "GteModel",
    "GteNewModel", "GteNewForSequenceClassification",
)  # fmt: skip
defaults = {  # as its own config class has them
    "vocab_size": 30528,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-12,
    "pack_qkv": True,
    "rope_parameters": None,
}
fixed = {
    "is_decoder": (False, None),
    "is_encoder_decoder": (False, None),
    "tie_word_embeddings": (True, False, None),
    "layer_norm_type": ("layer_norm", None),
    "position_embedding_type": ("rope",),
    "logn_attention_scale": (False, None),
}
shared = ("num_attention_heads", "intermediate_size")
unused = r"pooler\.|lm_head\."  # of the pre-training
NAMING = Naming(
    parts={
        **EMBEDDINGS,
        "layers": "encoder.layer",
        "self_attn": "attention",
        "input_layernorm": "attn_ln",
        "post_attention_layernorm": "mlp_ln",
    },
    prefix="new.",
    is_optional=True,
)


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    sizes, act = encoder_sizes(config), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    fused = "qkv_proj" if read(bool, config, "pack_qkv") else ""

    def layer(index: int) -> PostNormLayer:
        qkv = Linear.qkv(*sizes.attention, bias=True, fused=fused)
        attention = Attention(index, *sizes.attention, cos_sin, qkv=qkv, out_bias=True)
        mlp = GatedMLP(
            sizes.hidden, sizes.intermediate, act=act, fused="up_gate_proj", up_first=True, bias=(False, True)
        )
        return PostNormLayer(attention, mlp, (LayerNorm(sizes.hidden, sizes.eps), LayerNorm(sizes.hidden, sizes.eps)))

    return EncoderStack(
        sizes,
        layer,
        max_positions,
        naming=NAMING,
        embedding_norm=LayerNorm(sizes.hidden, sizes.eps),
        token_types=read_count(config, "type_vocab_size"),
    )


classifier = bert.classifier
