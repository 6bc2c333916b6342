"""EuroBERT (Boizard et al., 2025): Llama's layers, looking both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.encoder import Dense, HeadLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import Naming, Sizes
from quire.models.encoder import EncoderStack

architectures = (
    "EuroBertModel", "EuroBertForMaskedLM", "EuroBertForSequenceClassification", "EuroBertForTokenClassification",
)  # fmt: skip
defaults = {  # as transformers has them
    "vocab_size": 128256,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_pooling": "late",
}
fixed = {"is_encoder_decoder": (False, None), "tie_word_embeddings": (False, True, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
unused = r"lm_head\."
NAMING = Naming(is_optional=True)


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    sizes, act = Sizes.read(config), read(str, config, "hidden_act")
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    bias, mlp_bias = read(bool, config, "attention_bias"), read(bool, config, "mlp_bias")

    def layer(index: int) -> DecoderLayer:
        attention = Attention(index, *sizes.attention, cos_sin, qkv_bias=bias, out_bias=bias)
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act, bias=mlp_bias)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps)

    norm = RMSNorm(sizes.hidden, sizes.eps)
    return EncoderStack(sizes, layer, max_positions, naming=NAMING, embedding_norm=None, norm=norm)


def classifier(config: Mapping[str, Any], architecture: str, num_labels: int) -> list[HeadLayer]:
    hidden = read_positive(config, "hidden_size")
    last = Dense("classifier", hidden, num_labels, bias=True)
    if architecture.endswith("TokenClassification"):
        return [last]
    return [Dense("dense", hidden, hidden, bias=True, act="gelu"), last]
