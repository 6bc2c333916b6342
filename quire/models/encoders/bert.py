"""BERT (Devlin et al., 2018): MiniLM, BGE, E5, GTE and many embedders and rerankers after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.encoder import Dense, HeadLayer, HeadNorm
from quire.models.encoder import EncoderStack, bert_stack

architectures = (
    "BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification",
    "BertSpladeSparseEmbeddingModel", "HF_ColBERT",
)  # fmt: skip
defaults = {  # as transformers has them
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
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
unused = r"pooler\.|cls\."  # heads of the pre-training


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    return bert_stack(config, max_positions, prefix="bert.")


def classifier(config: Mapping[str, Any], architecture: str, num_labels: int) -> list[HeadLayer]:
    hidden = read_positive(config, "hidden_size")
    last = Dense("classifier", hidden, num_labels, bias=True)
    if architecture.endswith("TokenClassification"):
        return [last]
    return [Dense("pooler.dense", hidden, hidden, bias=True, act="tanh"), last]


def vocabulary_head(config: Mapping[str, Any]) -> tuple[list[HeadLayer], str]:
    hidden, eps = read_positive(config, "hidden_size"), read(float, config, "layer_norm_eps")
    dense = Dense("cls.predictions.transform.dense", hidden, hidden, bias=True, act=read(str, config, "hidden_act"))
    return [dense, HeadNorm("cls.predictions.transform.LayerNorm", hidden, eps)], "cls.predictions"
