"""Jina Embeddings v3 (Sturua et al., 2024) without its adapters: XLM-RoBERTa with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.block import PostNormLayer
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import rotary_table
from quire.models.base import Naming
from quire.models.encoder import EMBEDDINGS, EncoderStack, encoder_sizes
from quire.models.encoders import roberta

architectures = (
    "JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM", "JinaEmbeddingsV3ForSequenceClassification",
    "JinaEmbeddingsV3ForTokenClassification",
)  # fmt: skip
defaults = {  # as transformers has them
    "vocab_size": 250002,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-05,
    "rope_parameters": None,
}
fixed = {"is_encoder_decoder": (False, None), "tie_word_embeddings": (True, False, None)}
shared = ("num_attention_heads", "intermediate_size")
rotary = {"rope_theta": 20000.0}
unused = roberta.unused
NAMING = Naming(
    parts={
        **EMBEDDINGS,
        "embedding_norm": "emb_ln",
        "layers": "encoder.layers",
        "self_attn": "mixer",
        "o_proj": "out_proj",
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
        "up_proj": "fc1",
        "down_proj": "fc2",
    },
    prefix="roberta.",
    is_optional=True,
)


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    sizes, act = encoder_sizes(config), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)

    def layer(index: int) -> PostNormLayer:
        qkv = Linear.qkv(*sizes.attention, bias=True, fused="Wqkv")
        attention = Attention(index, *sizes.attention, cos_sin, qkv=qkv, out_bias=True)
        mlp = MLP(sizes.hidden, sizes.intermediate, act)
        return PostNormLayer(attention, mlp, (LayerNorm(sizes.hidden, sizes.eps), LayerNorm(sizes.hidden, sizes.eps)))

    return EncoderStack(
        sizes,
        layer,
        max_positions,
        naming=NAMING,
        embedding_norm=LayerNorm(sizes.hidden, sizes.eps),
        token_types=read_positive(config, "type_vocab_size"),
    )


classifier = roberta.classifier
