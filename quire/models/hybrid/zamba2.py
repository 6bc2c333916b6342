"""Zamba 2: Mamba-2 in every layer, and before some of them one of a few shared blocks of attention and feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_count, read_positive
from quire.foundation.errors import ConfigError
from quire.layers.activation import activation
from quire.layers.recurrent.mamba2 import GatedNorm, Mamba2, Mamba2Sizes
from quire.layers.recurrent.shared_block import MambaLayer, SharedBlock, SharedSizes, SharingLayer
from quire.layers.rotary import no_rotation, rotary_table
from quire.models.base import DecoderStack, Naming, Sizes
from quire.models.hybrid.reading import kinds_of_layers
from quire.models.sharing import SharingStack

architectures = ("Zamba2ForCausalLM",)
defaults = {  # as transformers has them
    "vocab_size": 32000,
    "hidden_size": 2560,
    "num_hidden_layers": 54,
    "layers_block_type": None,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "intermediate_size": None,
    "hidden_act": "gelu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": None,
    "use_mem_rope": False,
    "num_mem_blocks": 1,
    "tie_word_embeddings": True,
    "use_shared_attention_adapter": False,
    "adapter_rank": 128,
    "add_bias_linear": False,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "time_step_min": 0.001,
}
fixed = {
    "use_long_context": (False, None),
    "is_encoder_decoder": (False, None),
}
shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "n_mamba_heads", "mamba_ngroups")
aliases = {"layer_types": "layers_block_type"}
KINDS = {"linear_attention": "mamba", "mamba": "mamba", "hybrid": "hybrid"}
USUAL = (
    ["mamba"]
    + (["mamba"] * 5 + ["hybrid"]) * 7
    + ["mamba"] * 4
    + ["hybrid"]
    + ["mamba"] * 3
    + ["hybrid"]
    + ["mamba"] * 2
)
GATED_EPS = 1e-5


def build(config: Mapping[str, Any], max_positions: int) -> DecoderStack:
    """Attention is twice as wide as the model. The first layers that attend own a block each; the others take turns.
    With an untied head nothing is shared, as transformers has it: each of them has its own."""
    kinds = USUAL
    if config["layers_block_type"] is not None:
        kinds = kinds_of_layers(config, "layers_block_type", KINDS, None)
    told = {**config, "num_hidden_layers": len(kinds)}
    sizes = Sizes.read(
        {**told, "head_dim": 2 * read_positive(told, "hidden_size") // read_positive(told, "num_attention_heads")}
    )
    if sizes.kv_heads != sizes.heads or sizes.heads * sizes.head_dim != 2 * sizes.hidden:
        raise ConfigError(
            f"config.json: num_attention_heads={sizes.heads} must be num_key_value_heads={sizes.kv_heads}, and divide "
            f"2 * hidden_size={2 * sizes.hidden}",
            "num_key_value_heads",
        )
    states, bias, act = (
        _states(config),
        read(bool, config, "add_bias_linear"),
        activation(read(str, config, "hidden_act")),
    )
    shared = SharedSizes(
        hidden=sizes.hidden, heads=sizes.heads, head_dim=sizes.head_dim, intermediate=sizes.intermediate,
        rank=read_positive(config, "adapter_rank"), bias=bias, eps=sizes.eps,
        adapts_attention=read(bool, config, "use_shared_attention_adapter"),
    )  # fmt: skip
    turns = read(bool, config, "use_mem_rope")
    cos_sin = (rotary_table(config, sizes.head_dim, max_positions) if turns
               else no_rotation(max_positions, sizes.head_dim))  # fmt: skip
    users = [index for index, kind in enumerate(kinds) if kind == "hybrid"]
    count = min(read_positive(config, "num_mem_blocks"), len(users))
    tied = read(bool, config, "tie_word_embeddings")
    own = count if tied else len(users)
    blocks = [SharedBlock(shared, list(range(first % count, len(users), count)), act) for first in range(own)]

    def layer(index: int) -> MambaLayer | SharingLayer:
        norm = GatedNorm(states.inner, GATED_EPS, groups=states.groups)
        mamba = MambaLayer(Mamba2(index, states, norm), sizes.hidden, sizes.eps)
        if kinds[index] == "mamba":
            return mamba
        user = users.index(index)
        return SharingLayer(index, user, blocks[user % own], mamba, cos_sin, owns=user < own)

    naming = Naming(trunk={"norm": "final_layernorm"})
    return SharingStack(sizes, layer, tied=tied, naming=naming)


def _states(config: Mapping[str, Any]) -> Mamba2Sizes:
    """Raises ConfigError for heads that do not go together."""
    hidden, heads, groups = (read_positive(config, key) for key in ("hidden_size", "n_mamba_heads", "mamba_ngroups"))
    inner = read_positive(config, "mamba_expand") * hidden
    if inner % heads or heads % groups:
        raise ConfigError(
            f"config.json: n_mamba_heads={heads} in mamba_ngroups={groups} do not make {inner}", "n_mamba_heads"
        )
    bias = read(bool, config, "add_bias_linear")
    return Mamba2Sizes(
        hidden=hidden, heads=heads, head_dim=inner // heads, groups=groups,
        state=read_positive(config, "mamba_d_state"),
        taps=read_count(config, "mamba_d_conv", least=2), eps=GATED_EPS,
        limit=(read(float, config, "time_step_min"), float("inf")), bias=bias, out_bias=bias,
    )  # fmt: skip
