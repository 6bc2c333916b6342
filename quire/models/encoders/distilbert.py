"""DistilBERT (Sanh et al., 2019): half of BERT's layers, and no token types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.encoder import Dense, HeadLayer, HeadNorm
from quire.models.encoder import BERT_NAMES, EncoderStack, bert_stack

architectures = (
    "DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification",
    "DistilBertForTokenClassification",
)  # fmt: skip
defaults = {  # as transformers has them
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
}
fixed = {
    "is_decoder": (False, None),
    "is_encoder_decoder": (False, None),
    "tie_word_embeddings": (True, False, None),
    "sinusoidal_pos_embds": (False, True, None),  # which are stored all the same
}
shared = ("num_attention_heads", "intermediate_size")
aliases = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
unused = r"vocab_(transform|layer_norm|projector)\."  # of the pre-training
EPS = 1e-12
NAMES = {
    **BERT_NAMES,
    "layers": "transformer.layer",
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "attention_out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "norm": "output_layer_norm",
}


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    return bert_stack({**config, "layer_norm_eps": EPS}, max_positions, prefix="distilbert.", names=NAMES)


def classifier(config: Mapping[str, Any], architecture: str, num_labels: int) -> list[HeadLayer]:
    hidden = read_positive(config, "hidden_size")
    last = Dense("classifier", hidden, num_labels, bias=True)
    if architecture.endswith("TokenClassification"):
        return [last]
    return [Dense("pre_classifier", hidden, hidden, bias=True, act="relu"), last]


def vocabulary_head(config: Mapping[str, Any]) -> tuple[list[HeadLayer], str]:
    hidden, act = read_positive(config, "hidden_size"), read(str, config, "hidden_act")
    dense = Dense("vocab_transform", hidden, hidden, bias=True, act=act)
    return [dense, HeadNorm("vocab_layer_norm", hidden, EPS)], "vocab_projector"
