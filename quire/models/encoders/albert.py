"""ALBERT (Lan et al., 2019): BERT whose layers share their weights, and whose embeddings are narrower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.encoder import Dense, HeadLayer, HeadNorm
from quire.models.encoder import EMBEDDINGS, EncoderStack, shared_stack

architectures = (
    "AlbertModel", "AlbertForMaskedLM", "AlbertForSequenceClassification", "AlbertForTokenClassification",
)  # fmt: skip
defaults = {  # as transformers has them
    "vocab_size": 30000,
    "embedding_size": 128,
    "hidden_size": 4096,
    "num_hidden_layers": 12,
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "num_attention_heads": 64,
    "intermediate_size": 16384,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
fixed = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "is_encoder_decoder": (False, None),
    "tie_word_embeddings": (True, False, None),
}
shared = ("num_attention_heads", "intermediate_size")
unused = r"pooler\.|predictions\.|sop_classifier\."
NAMES = {
    **EMBEDDINGS,
    "widening": "encoder.embedding_hidden_mapping_in",
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "attention_out": "attention.dense",
    "attention_norm": "attention.LayerNorm",
    "up": "ffn",
    "down": "ffn_output",
    "norm": "full_layer_layer_norm",
}


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    return shared_stack(config, max_positions, prefix="albert.", names=NAMES)


def classifier(config: Mapping[str, Any], architecture: str, num_labels: int) -> list[HeadLayer]:
    hidden = read_positive(config, "hidden_size")
    last = Dense("classifier", hidden, num_labels, bias=True)
    if architecture.endswith("TokenClassification"):
        return [last]
    return [Dense("pooler", hidden, hidden, bias=True, act="tanh"), last]


def vocabulary_head(config: Mapping[str, Any]) -> tuple[list[HeadLayer], str]:
    hidden, width = read_positive(config, "hidden_size"), read_positive(config, "embedding_size")
    dense = Dense("predictions.dense", hidden, width, bias=True, act=read(str, config, "hidden_act"))
    return [dense, HeadNorm("predictions.LayerNorm", width, read(float, config, "layer_norm_eps"))], "predictions"
