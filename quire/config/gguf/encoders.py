"""BERT and its kin in GGUF files, and how vectors are made of its states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.gguf.family import GgufFamily
from quire.config.gguf.metadata import Metadata
from quire.foundation.errors import ConfigError
from quire.foundation.gguf_header import GgufTensor

_POOLINGS = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}  # of pooling_type
_EMBEDDINGS = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
}  # fmt: skip
_MODULES = "sentence_transformers.models"


def pooling_files(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What sentence-transformers would keep beside an encoder, by its place in the model's folder."""
    told = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if metadata.get("general.architecture") not in ENCODERS or told not in _POOLINGS:
        return {}
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"{_MODULES}.{kind}", "path": path} for kind, path in kinds.items()]
    return {"modules.json": modules, "1_Pooling/config.json": {f"pooling_mode_{_POOLINGS[told]}": True}}


def _lines(tensors: Mapping[str, GgufTensor], name: str) -> int:
    """Of a table. Raises ConfigError if it is not there."""
    if name not in tensors:
        raise ConfigError(f"the GGUF file has no {name}", "model")
    return tensors[name].shape[0] if len(tensors[name].shape) > 1 else 1


def _types(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    del metadata
    config["type_vocab_size"] = _lines(tensors, "token_types.weight")


def _tables(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    _types(metadata, config, tensors)
    config["max_position_embeddings"] = _lines(tensors, "position_embd.weight")


_BERT = GgufFamily(
    "BertModel",
    {
        **_EMBEDDINGS,
        "position_embd.weight": "embeddings.position_embeddings.weight",
        "token_embd_norm.weight": "embeddings.LayerNorm.weight",
        "token_embd_norm.bias": "embeddings.LayerNorm.bias", "attn_q": "attention.self.query",
        "attn_k": "attention.self.key", "attn_v": "attention.self.value", "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm", "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
    },
    prefix="", layers="encoder.layer.", eps="layer_norm_eps", bias=None, turns=False, read=_tables,
    lifted={"token_types": (0, 2)},
    neutral={"attention.causal": (False,), "pooling_type": (0, *_POOLINGS)},
)  # fmt: skip
ENCODERS: dict[str, GgufFamily] = {
    "bert": _BERT,
    "nomic-bert": replace(
        _BERT, architecture="NomicBertModel", layers="encoder.layers.", turns=True, read=_types,
        names={
            **_EMBEDDINGS, "token_embd_norm.weight": "emb_ln.weight", "token_embd_norm.bias": "emb_ln.bias",
            "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1", "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2", "layer_output_norm": "norm2",
        },
    ),
}  # fmt: skip
