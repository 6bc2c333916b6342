"""BERT in GGUF files, and how vectors are made of its states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.gguf.family import GgufFamily
from quire.config.gguf.metadata import Metadata
from quire.foundation.errors import ConfigError
from quire.foundation.gguf_header import GgufTensor

_POOLINGS = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}  # of pooling_type
_MODULES = "sentence_transformers.models"


def pooling_files(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What sentence-transformers would keep beside an encoder, by its place in the model's folder."""
    told = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if metadata.get("general.architecture") not in ENCODERS or told not in _POOLINGS:
        return {}
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"{_MODULES}.{kind}", "path": path} for kind, path in kinds.items()]
    return {"modules.json": modules, "1_Pooling/config.json": {f"pooling_mode_{_POOLINGS[told]}": True}}


def _tables(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """Raises ConfigError for one that is not there."""
    del metadata
    for name, key in (("position_embd.weight", "max_position_embeddings"), ("token_types.weight", "type_vocab_size")):
        if name not in tensors:
            raise ConfigError(f"the GGUF file has no {name}", "model")
        config[key] = tensors[name].shape[0] if len(tensors[name].shape) > 1 else 1


ENCODERS: dict[str, GgufFamily] = {
    "bert": GgufFamily(
        "BertModel",
        {
            "token_embd.weight": "embeddings.word_embeddings.weight",
            "position_embd.weight": "embeddings.position_embeddings.weight",
            "token_types.weight": "embeddings.token_type_embeddings.weight",
            "token_embd_norm.weight": "embeddings.LayerNorm.weight",
            "token_embd_norm.bias": "embeddings.LayerNorm.bias", "attn_q": "attention.self.query",
            "attn_k": "attention.self.key", "attn_v": "attention.self.value", "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm", "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
        },
        prefix="", layers="encoder.layer.", eps="layer_norm_eps", bias=None, turns=False, read=_tables,
        lifted={"token_types": (0, 2)},
        neutral={"attention.causal": (False,), "pooling_type": (0, *_POOLINGS)},
    ),
}  # fmt: skip
