"""RoBERTa (Liu et al., 2019) and XLM-RoBERTa: BERT's layers, positions that begin behind the padding token's id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.encoder import Dense
from quire.models.encoder import EncoderStack

architectures = (
    "RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification", "RobertaForTokenClassification",
    "XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification",
    "XLMRobertaForTokenClassification",
)  # fmt: skip
unused = r"pooler\.|lm_head\."


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    return EncoderStack(
        config, max_positions, prefix="roberta.", first_position=read(int, config, "pad_token_id", 1) + 1
    )


def classifier(config: Mapping[str, Any], architecture: str, num_labels: int) -> list[Dense]:
    hidden = read_positive(config, "hidden_size")
    if architecture.endswith("TokenClassification"):
        return [Dense("classifier", hidden, num_labels, bias=True)]
    return [
        Dense("classifier.dense", hidden, hidden, bias=True, act="tanh"),
        Dense("classifier.out_proj", hidden, num_labels, bias=True),
    ]
