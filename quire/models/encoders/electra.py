"""ELECTRA (Clark et al., 2020): BERT, whose embeddings may be narrower than its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read_positive
from quire.layers.encoder import Dense, HeadLayer
from quire.models.encoder import EncoderStack, bert_stack

architectures = ("ElectraModel", "ElectraForSequenceClassification", "ElectraForTokenClassification")
defaults = {  # as transformers has them
    "vocab_size": 30522,
    "embedding_size": 128,
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
fixed = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "tie_word_embeddings": (True, False, None),
}
shared = ("num_attention_heads", "intermediate_size")
unused = r"(generator|discriminator)_"  # heads of the pre-training


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    return bert_stack(config, max_positions, prefix="electra.")


def classifier(config: Mapping[str, Any], architecture: str, num_labels: int) -> list[HeadLayer]:
    hidden = read_positive(config, "hidden_size")
    if architecture.endswith("TokenClassification"):
        return [Dense("classifier", hidden, num_labels, bias=True)]
    return [
        Dense("classifier.dense", hidden, hidden, bias=True, act="gelu"),
        Dense("classifier.out_proj", hidden, num_labels, bias=True),
    ]
