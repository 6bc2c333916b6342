"""BERT (Devlin et al., 2018): MiniLM, BGE, E5, GTE and many embedders and rerankers after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read_positive
from quire.layers.encoder import Dense
from quire.models.encoder import EncoderStack

architectures = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification")
unused = r"pooler\.|cls\."  # heads of the pre-training


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    return EncoderStack(config, max_positions, prefix="bert.")


def classifier(config: Mapping[str, Any], architecture: str, num_labels: int) -> list[Dense]:
    hidden = read_positive(config, "hidden_size")
    last = Dense("classifier", hidden, num_labels, bias=True)
    if architecture.endswith("TokenClassification"):
        return [last]
    return [Dense("pooler.dense", hidden, hidden, bias=True, act="tanh"), last]
