"""DeBERTa v2 and v3 (He et al., 2020, 2021): BERT whose scores are of contents and of how far apart these are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.layers.encoder import Dense, HeadLayer, Nearness
from quire.models.encoder import BERT_NAMES, EncoderStack, disentangled_stack

architectures = ("DebertaV2Model", "DebertaV2ForSequenceClassification", "DebertaV2ForTokenClassification")
defaults = {  # as transformers has them
    "vocab_size": 128100,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "embedding_size": None,
    "relative_attention": False,
    "max_relative_positions": -1,
    "position_buckets": None,
    "position_biased_input": True,
    "pos_att_type": None,
    "share_att_key": None,
    "norm_rel_ebd": None,
    "pooler_hidden_act": "gelu",
}
fixed = {
    "conv_kernel_size": (0, None),
    "attention_head_size": (None,),
    "is_decoder": (False, None),
    "is_encoder_decoder": (False, None),
    "tie_word_embeddings": (True, False, None),
}
shared = ("num_attention_heads", "intermediate_size")
unused = r"pooler\.|cls\.|lm_predictions\.|mask_predictions\."
NAMES = {
    **BERT_NAMES,
    "query": "attention.self.query_proj",
    "key": "attention.self.key_proj",
    "value": "attention.self.value_proj",
    "pos_key": "attention.self.pos_key_proj",
    "pos_query": "attention.self.pos_query_proj",
    "distances": "encoder",
    "rows": "rel_embeddings",
    "rows_norm": "LayerNorm",
}


def build(config: Mapping[str, Any], max_positions: int) -> EncoderStack:
    return disentangled_stack(config, max_positions, prefix="deberta.", names=NAMES, near=_nearness(config))


def _nearness(config: Mapping[str, Any]) -> Nearness:
    """Raises ConfigError for terms that are none."""
    if not read(bool, config, "relative_attention"):
        raise ConfigError(
            "config.json: relative_attention=false: DeBERTa without distances between tokens is not supported",
            "relative_attention",
        )
    told = config["pos_att_type"] or []
    kinds = [one.strip() for one in told.lower().split("|")] if isinstance(told, str) else told
    if not isinstance(kinds, list) or not {*map(str, kinds)} <= {"c2p", "p2c"}:
        raise ConfigError(f"config.json: pos_att_type must be of c2p and p2c, got {shown(told)}", "pos_att_type")
    far = read_count(config, "max_relative_positions", least=-1)
    far = far if far >= 1 else read_positive(config, "max_position_embeddings")
    buckets = read_count(config, "position_buckets", -1, least=-1)
    if buckets == 1:
        raise ConfigError("config.json: position_buckets must be more than 1 (or -1: none), got 1", "position_buckets")
    norm = read(str, config, "norm_rel_ebd", "none").lower()
    if norm not in ("none", "layer_norm"):
        raise ConfigError(f"config.json: norm_rel_ebd must be none or layer_norm, got {norm!r}", "norm_rel_ebd")
    return Nearness(
        span=buckets if buckets > 0 else far, buckets=buckets, far=far, by_key="c2p" in kinds, by_query="p2c" in kinds,
        shared=read(bool, config, "share_att_key", False), normed=norm == "layer_norm",
    )  # fmt: skip


def classifier(config: Mapping[str, Any], architecture: str, num_labels: int) -> list[HeadLayer]:
    hidden = read_positive(config, "hidden_size")
    last = Dense("classifier", hidden, num_labels, bias=True)
    if architecture.endswith("TokenClassification"):
        return [last]
    act = read(str, config, "pooler_hidden_act")
    return [Dense("pooler.dense", hidden, hidden, bias=True, act=act), last]
