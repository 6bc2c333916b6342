"""A family of GGUF files: what of ours it is, what its tensors are called, and what converters did to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.gguf.metadata import Metadata
from quire.foundation.gguf_header import GgufTensor

Reader = Callable[[Metadata, dict[str, Any], Mapping[str, GgufTensor]], None]
"""Completes config.json by what is said otherwise than elsewhere. Raises ConfigError."""

_DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_AHEAD = "nextn."  # of the layers behind the last one, which predict further tokens
# Tensors that are looked up, added, or taken a column at a time, and not multiplied by: they are no blocks here.
NOT_MATRICES = (
    "token_embd", "ffn_gate_inp", "ffn_gate_inp_shexp", "shortconv.conv", "attn_q_norm", "attn_k_norm", "ssm_conv1d",
    "ssm_norm", "position_embd", "token_types", "per_layer_token_embd", "altup_proj", "altup_unembd_proj",
)  # fmt: skip
DECAYS = "ssm_a"
"""How fast states fade: files have the negative number itself, and Hugging Face's form the logarithm of its size."""
OWN_NORM = "ssm_norm"
"""Of states' outputs: nothing is added to its weights in any family."""
SPLIT_LATENT = ("attn_k_b", "attn_v_b")
"""Newer files' halves of the matrix that makes keys and values of latent rows, [heads, rank, columns of a key] and
[heads, columns of a value, rank]."""
WHOLE_LATENT = "self_attn.kv_b_proj"
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z0-9_.]+?)(?:\.(weight|bias))?")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """names: of tensors where they are not Llama's; with `.weight` or `.bias` behind them, the whole of ours, `{}`
    standing for a number along the first dimension. bare: names of tensors without either, and the whole of ours.
    prefix: of all our names but the head's. layers: and of a layer's number. pairs: rows of queries and keys are
    ordered so that neighbours turn together, and are put back. plus_one: weights of norms have 1 added. keys: more
    metadata that config.json knows, by its names there. fixed: what the files leave unsaid. eps, bias: what config.json
    calls the epsilon of norms, and whether queries have a bias (None: it does not say). neutral: values that say no
    more than the family does. lifted: tensors whose shape lacks a 1: at which place, and of how many dimensions. flat:
    those whose numbers have one dimension with us. idle: sizes that the family lacks, or reads by itself. sharpened:
    what the logarithm's multiplier of YaRN is multiplied by to be `mscale_all_dim`; 0: there is none."""

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    bare: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model."
    layers: str = "layers."
    pairs: bool = False
    plus_one: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    windows: bool = False
    partial: bool = False  # a share of each head may turn
    eps: str = "rms_norm_eps"
    bias: str | None = "attention_bias"
    mlp_bias: bool = False  # config.json says whether feed-forward layers have one
    sized: bool = False  # config.json says the size of a head
    some_attend: bool = False  # layers without key heads do not
    latent: bool = False  # keys and values are made of latent rows
    ahead: bool = False  # layers behind the last one are counted too, and left out here
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    lifted: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    flat: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    turns: bool = True  # queries and keys; what files say of it otherwise is of no account
    sharpened: float = 0.0
    read: Reader | None = None


def decoders_name(family: GgufFamily, tensor: str) -> str | None:
    """What Hugging Face's form calls a tensor, `{}` standing for the number of an expert; None: nobody knows it."""
    match = _NAME.fullmatch(tensor)
    if match is None:
        return None
    layer, name, kind = match.groups()
    prefix = family.prefix if layer is None else f"{family.prefix}{family.layers}{layer}."
    if kind is None:
        whole = family.bare.get(name)
        return None if whole is None else prefix + whole
    whole = family.names.get(f"{name}.{kind}")
    if whole is not None:
        return prefix + whole
    if layer is None:
        known = _OUTSIDE.get(name)
        return None if known is None else f"{known}.{kind}"
    known = name if family.ahead and name.startswith(_AHEAD) else family.names.get(name, _DENSE.get(name))
    return None if known is None else f"{prefix}{known}.{kind}"


def layer_of(tensor: str) -> int | None:
    """The number of the layer that it is in."""
    match = _NAME.fullmatch(tensor)
    return None if match is None or match[1] is None else int(match[1])


def base_name(tensor: str) -> str:
    """Without the layer's number, and without `.weight`."""
    match = _NAME.fullmatch(tensor)
    return tensor if match is None else match[2]


def is_matrix(tensor: str) -> bool:
    """Whether a tensor of two dimensions is multiplied by, and so may stay in blocks."""
    match = _NAME.fullmatch(tensor)
    return match is not None and match[3] == "weight" and match[2] not in (*NOT_MATRICES, *SPLIT_LATENT)
