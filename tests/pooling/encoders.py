"""Tiny encoders of every family, in every variant that changes the maths; and what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.twins import renamed
from tests.pooling.checkpoints import DECODER, ENCODER, save_tokenizer

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED = {"local_attention": 8, "max_position_embeddings": 66, "cls_token_id": 2, "sep_token_id": 3}
BY_KIND = {
    FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    SLIDING: {"rope_type": "default", "rope_theta": 90.0},
}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0}
V3 = {"relative_attention": True, "pos_att_type": "p2c|c2p"}
IDS = {"bos_token_id": 2, "eos_token_id": 3}
Case = tuple[str, dict[str, Any]]  # transformers' class, without what it is for; config
CASES: dict[str, Case] = {
    "bert": ("Bert", {}),
    "bert-relu": ("Bert", {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-2}),
    "roberta": ("Roberta", {"pad_token_id": 1}),
    "xlm_roberta": ("XLMRoberta", {"pad_token_id": 1, "hidden_act": "gelu_new"}),
    "modernbert": ("ModernBert", {**WINDOWED, "num_hidden_layers": 4}),
    "modernbert-biases": (
        "ModernBert",
        {**WINDOWED, "attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "silu",
         "classifier_bias": True, "classifier_pooling": "mean", "classifier_activation": "relu", "norm_eps": 1e-2},
    ),
    "modernbert-kinds": (
        "ModernBert", {**WINDOWED, "layer_types": [SLIDING, FULL, SLIDING], "rope_parameters": BY_KIND},
    ),
    "eurobert": ("EuroBert", {"num_key_value_heads": 2}),
    "eurobert-biases": (
        "EuroBert",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "rope_parameters": LINEAR,
         "classifier_pooling": "mean", "rms_norm_eps": 1e-2, "hidden_act": "gelu"},
    ),
    "eurobert-bos": ("EuroBert", {"classifier_pooling": "bos"}),
    "nomic_bert": ("NomicBert", {}),
    "nomic_bert-gelu": ("NomicBert", {"hidden_act": "gelu", "head_dim": 16, "rope_parameters": LINEAR}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {}),
    "jina_embeddings_v3-linear": ("JinaEmbeddingsV3", {"hidden_act": "relu", "rope_parameters": LINEAR}),
    "distilbert": ("DistilBert", {"dim": 48, "n_heads": 4, "n_layers": 3, "hidden_dim": 72}),
    "distilbert-relu": ("DistilBert", {"dim": 48, "n_heads": 6, "n_layers": 2, "hidden_dim": 72, "activation": "relu"}),
    "electra": ("Electra", {"embedding_size": 20}),
    "electra-even": ("Electra", {"embedding_size": 48, "hidden_act": "relu", "layer_norm_eps": 1e-2}),
    "mpnet": ("MPNet", {"pad_token_id": 1, "max_position_embeddings": 66}),
    "mpnet-relu": ("MPNet", {"pad_token_id": 1, "hidden_act": "relu", "layer_norm_eps": 1e-2}),
    "deberta_v2": (
        "DebertaV2",
        {**V3, "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0,
         "position_biased_input": False},
    ),
    "deberta_v2-own": ("DebertaV2", {**V3, "type_vocab_size": 2, "pooler_hidden_act": "tanh", "hidden_act": "relu"}),
    "deberta_v2-keys": (
        "DebertaV2", {**V3, "pos_att_type": ["c2p"], "max_relative_positions": 9, "layer_norm_eps": 1e-2},
    ),
    "albert": ("Albert", {"embedding_size": 20, "inner_group_num": 2}),
    "albert-groups": (
        "Albert",
        {"embedding_size": 48, "num_hidden_layers": 4, "num_hidden_groups": 2, "hidden_act": "relu",
         "layer_norm_eps": 1e-2},
    ),
    "gte": ("NomicBert", {"hidden_act": "gelu"}),
    "gte-unpacked": ("NomicBert", {"hidden_act": "relu", "type_vocab_size": 1, "layer_norm_eps": 1e-2}),
}  # fmt: skip


def make(case: str, folder: Path, what: str = "Model", seed: int = 0, **more: Any) -> Any:
    """A float32 checkpoint whose outputs depend on every token, with a tokenizer. Returns transformers' own.

    what: it is for, the end of the architecture's name.
    """
    family, config = CASES[case]
    sizes = DECODER if "num_key_value_heads" in config else ENCODER
    made = getattr(transformers, f"{family}Config")(**{**sizes, **IDS, **config, **more})
    made._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}{what}")(made).float().eval()
    if case in BEFORE:
        BEFORE[case](model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = ("norm" in name.lower() or "_ln" in name) and name.endswith("weight")
            parameter.uniform_(0.5, 1.5) if is_norm else parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    if case.partition("-")[0] in TURNED:
        _turn(folder, TURNED[case.partition("-")[0]], case)
    save_tokenizer(folder, pairs="bert")
    return model


def states(model: Any, ids: list[int], token_types: list[int] | None = None) -> torch.Tensor:
    """transformers' last hidden states, [tokens, hidden]."""
    options = {} if token_types is None else {"token_type_ids": torch.tensor([token_types])}
    with torch.inference_mode():
        found: torch.Tensor = model.base_model(torch.tensor([ids]), **options).last_hidden_state[0]
    return found


# -- families whose code transformers does not have ----------------------------------------------------------------


def _with_biases(model: Any) -> None:
    """Nomic's layers, in which GTE has biases."""
    for layer in model.base_model.layers:
        for module, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")), (layer.mlp, ("down_proj",))):
            for name in names:
                old = getattr(module, name)
                setattr(module, name, torch.nn.Linear(old.in_features, old.out_features))


def _gte(state: dict[str, torch.Tensor], config: dict[str, Any], case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    packed = case == "gte"
    state = renamed(
        state, (r"^nomic_bert\.", "new."), ("emb_ln", "embeddings.LayerNorm"), (r"encoder\.layers", "encoder.layer"),
        (r"\.attn\.Wqkv", ".attention.qkv_proj"), (r"\.attn\.out_proj", ".attention.o_proj"), (r"\.norm1", ".attn_ln"),
        (r"\.norm2", ".mlp_ln"), (r"\.fc2", ".down_proj"),
    )  # fmt: skip
    for name in [name for name in state if ".fc11." in name]:
        both = [state.pop(name), state.pop(name.replace("fc11", "fc12"))]
        state[name.replace("fc11", "up_gate_proj")] = torch.cat(both)
    if not packed:
        for name in [name for name in state if ".qkv_proj." in name]:
            for part, rows in zip("qkv", state.pop(name).chunk(3), strict=True):
                state[name.replace("qkv_proj", f"{part}_proj")] = rows.contiguous()
    architecture = config["architectures"][0].replace("NomicBert", "New")
    own = {"architectures": [architecture], "position_embedding_type": "rope", "layer_norm_type": "layer_norm"}
    rope = config.pop("rope_parameters")
    return state, {**config, **own, "pack_qkv": packed, "rope_theta": rope["rope_theta"], "logn_attention_scale": False}


BEFORE: dict[str, Callable[[Any], None]] = {"gte": _with_biases, "gte-unpacked": _with_biases}
TURNED = {"gte": _gte}


def _turn(folder: Path, how: Callable[..., tuple[dict[str, Any], dict[str, Any]]], case: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    state, config = how(load_file(folder / "model.safetensors"), config, case)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
