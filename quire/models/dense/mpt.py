"""MPT: no positions but by a slope a head on how far away tokens are (ALiBi), and no biases at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive, read_section
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.head_terms import alibi_slopes_of_mpt
from quire.layers.linear import Linear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import no_rotation
from quire.models.base import DecoderStack, Naming, Sizes

architectures = ("MptForCausalLM", "MPTForCausalLM")
defaults = {  # as transformers has them
    "vocab_size": 50368,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-05,
    "tie_word_embeddings": True,
    "attn_config": None,
}
fixed = {
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "expansion_ratio": (4, None),
    "no_bias": (True, None),
    "logit_scale": (None,),
    "norm_type": ("low_precision_layernorm", "layernorm", None),
    "learned_pos_emb": (True, False, None),  # there is none beside slopes
}
aliases = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}
shared = ("num_attention_heads",)
NAMING = Naming(
    parts={
        "embed_tokens": "wte",
        "layers": "blocks",
        "input_layernorm": "norm_1",
        "self_attn": "attn",
        "o_proj": "out_proj",
        "post_attention_layernorm": "norm_2",
        "mlp": "ffn",
        "norm": "norm_f",
    },
    prefix="transformer.",
)
_ATTENTION = {  # what attn_config may say; the others are read
    "alibi": (True, None),
    "attn_type": ("multihead_attention", None),
    "prefix_lm": (False, None),
    "qk_ln": (False, None),
    "attn_uses_sequence_id": (False, None),
}
_HARMLESS = ("attn_impl", "attn_pdrop", "attn_dropout", "model_type", "transformers_version", "dtype")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config, "layer_norm_epsilon")
    told = _checked(read_section(config, "attn_config"))
    slopes = alibi_slopes_of_mpt(sizes.heads, read_positive(told, "alibi_bias_max", 8))
    scale, clip = read(float, told, "softmax_scale", None), read(float, told, "clip_qkv", None)
    still = no_rotation(max_positions, sizes.head_dim)

    def norm() -> LayerNorm:
        return LayerNorm(sizes.hidden, sizes.eps, bias=False)

    def layer(index: int) -> DecoderLayer:
        qkv = Linear.qkv(*sizes.attention, bias=False, fused="Wqkv")
        attention = Attention(index, *sizes.attention, still, qkv=qkv, scale=scale, clip=clip or None, slopes=slopes)
        mlp = MLP(sizes.hidden, sizes.intermediate, "gelu", bias=False)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    return DecoderStack(sizes, layer, tied=read(bool, config, "tie_word_embeddings"), norm=norm(), naming=NAMING)


def _checked(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises ConfigError for attention of another kind."""
    for key, value in told.items():
        is_known = key in _HARMLESS or key in ("alibi_bias_max", "softmax_scale", "clip_qkv")
        if not is_known and value not in _ATTENTION.get(key, (None, False)):
            raise ConfigError(
                f"config.json: attn_config has {key}={shown(value)}, which is not supported", "attn_config"
            )
    return told
