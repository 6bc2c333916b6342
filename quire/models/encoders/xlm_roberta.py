"""XLM-RoBERTa (Conneau et al., 2020): RoBERTa in a hundred languages."""

from __future__ import annotations

from quire.models.encoders import roberta

architectures = (
    "XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification",
    "XLMRobertaForTokenClassification", "BgeM3EmbeddingModel",
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
    "pad_token_id": 1,
}
fixed = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "tie_word_embeddings": (True, False, None),
}
shared = ("num_attention_heads", "intermediate_size")

build = roberta.build
classifier = roberta.classifier
unused = roberta.unused
vocabulary_head = roberta.vocabulary_head
