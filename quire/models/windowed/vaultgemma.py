"""VaultGemma: Gemma 2 without norms behind the halves of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive
from quire.layers.attention import Attention
from quire.layers.block import DecoderLayer
from quire.layers.embedding import rounded
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.models.base import DecoderStack, Logits, Naming, Sizes
from quire.models.window import layer_windows

architectures = ("VaultGemmaForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
fixed = {"is_causal": (True, None), "is_encoder_decoder": (False, None)}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    sizes = Sizes.read(config)
    cos_sin = rotary_table(config, sizes.head_dim, max_positions)
    windows = layer_windows(config, sizes.layers, max_positions, pattern=2)
    bias, act = read(bool, config, "attention_bias"), read(str, config, "hidden_activation")
    scale = read_positive(config, "query_pre_attn_scalar") ** -0.5
    softcap = read(float, config, "attn_logit_softcapping", 0.0)

    def norm() -> RMSNorm:
        return RMSNorm(sizes.hidden, sizes.eps, plus_one=True)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(
            index,
            *sizes.attention,
            cos_sin,
            window=windows[index],
            qkv_bias=bias,
            out_bias=bias,
            scale=scale,
            softcap=softcap,
        )
        mlp = GatedMLP(sizes.hidden, sizes.intermediate, act=act)
        return DecoderLayer(attention, mlp, sizes.hidden, sizes.eps, norms=(norm(), norm()))

    return DecoderStack(
        sizes,
        layer,
        tied=read(bool, config, "tie_word_embeddings"),
        norm=norm(),
        naming=Naming(parts={"post_attention_layernorm": "pre_feedforward_layernorm"}),
        logits=Logits(softcap=read(float, config, "final_logit_softcapping", 0.0)),
        embedding_scale=rounded(sizes.hidden**0.5),
    )
