"""MPNet (Song et al., 2020): BERT whose heads add a number to scores by how far apart two tokens are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.encoder import Dense, HeadLayer, HeadNorm
from quire.models.encoder import BERT_NAMES, EncoderStack, distances_stack

architectures = (
    "MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification", "MPNetForTokenClassification",
)  # fmt: skip
defaults = {  # as transformers has them
    "vocab_size": 30527,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
}
fixed = {
    "relative_attention_num_buckets": (32,),
    "is_decoder": (False, None),
    "is_encoder_decoder": (False, None),
    "tie_word_embeddings": (True, False, None),
}
shared = ("num_attention_heads", "intermediate_size")
unused = r"pooler\.|lm_head\."
NAMES = {
    **BERT_NAMES,
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "attention_out": "attention.attn.o",
    "attention_norm": "attention.LayerNorm",
    "distances": "encoder.relative_attention_bias",
}


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    return distances_stack(config, max_positions, prefix="mpnet.", names=NAMES)


def classifier(config: Mapping[str, Any], architecture: str, num_labels: int) -> list[HeadLayer]:
    hidden = read_positive(config, "hidden_size")
    if architecture.endswith("TokenClassification"):
        return [Dense("classifier", hidden, num_labels, bias=True)]
    return [
        Dense("classifier.dense", hidden, hidden, bias=True, act="tanh"),
        Dense("classifier.out_proj", hidden, num_labels, bias=True),
    ]


def vocabulary_head(config: Mapping[str, Any]) -> tuple[list[HeadLayer], str]:
    hidden, eps = read_positive(config, "hidden_size"), read(float, config, "layer_norm_eps")
    dense = Dense("lm_head.dense", hidden, hidden, bias=True, act="gelu")
    return [dense, HeadNorm("lm_head.layer_norm", hidden, eps)], "lm_head"
