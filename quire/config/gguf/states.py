"""Families of GGUF files whose layers keep states: Mamba, Mamba-2, the gated delta rule, by themselves or beside
attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from quire.config.gguf.family import GgufFamily
from quire.config.gguf.metadata import Metadata
from quire.config.gguf.sparse import SIGMOID
from quire.foundation.errors import ConfigError
from quire.foundation.gguf_header import GgufTensor
from quire.foundation.json_file import shown

_ATTENTION = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")


def _names(module: str) -> dict[str, str]:
    """Of a Mamba layer's tensors. module: what holds them."""
    return {
        "ssm_in": f"{module}.in_proj", "ssm_conv1d": f"{module}.conv1d", "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_norm": f"{module}.norm", "ssm_out": f"{module}.out_proj",
    }  # fmt: skip


def _bare(module: str) -> dict[str, str]:
    return {"ssm_a": f"{module}.A_log", "ssm_d": f"{module}.D"}


_ALONE = {
    **_names("mixer"), "token_embd.weight": "embeddings.weight", "output_norm.weight": "norm_f.weight",
    "attn_norm": "norm",
}  # fmt: skip


def _has(tensors: Mapping[str, GgufTensor], name: str) -> bool:
    """Whether any layer has a tensor of that name."""
    return any(tensor.startswith("blk.") and tensor.split(".", 2)[2] == name for tensor in tensors)


def _rows(tensors: Mapping[str, GgufTensor], names: Iterable[str]) -> int:
    """Of the first matrix of one of these names. Raises ConfigError if there is none."""
    names = tuple(names)
    for tensor, told in tensors.items():
        if tensor.startswith("blk.") and tensor.split(".", 2)[2] in names:
            return told.shape[0]
    raise ConfigError(f"the GGUF file has no {' nor '.join(names)}", "model")


def _head_dim(metadata: Metadata) -> int:
    """Of a state. Raises ConfigError for channels that heads cannot share."""
    inner, heads = metadata.number("ssm.inner_size"), metadata.number("ssm.time_step_rank")
    if inner % heads:
        raise ConfigError(f"ssm.inner_size={inner} is no multiple of ssm.time_step_rank={heads}, its heads", "model")
    return int(inner // heads)


def _expand(metadata: Metadata, config: Mapping[str, Any]) -> int:
    """Channels of states by the model's own. Raises ConfigError for no whole number."""
    inner, hidden = metadata.number("ssm.inner_size"), config["hidden_size"]
    if inner % hidden:
        raise ConfigError(f"ssm.inner_size={inner} is no multiple of embedding_length={hidden}", "model")
    return int(inner // hidden)


def _by_layer(metadata: Metadata, key: str, layers: int) -> list[Any]:
    """A number for each layer. Raises ConfigError for another count of them."""
    told = metadata.by_layer(key)
    if told is None or len(told) != layers:
        raise ConfigError(f"{key} must be {layers} numbers, one a layer, got {shown(metadata.get(key))}", "model")
    return told


def _mamba(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """One with norms of steps, B and C is FalconMamba."""
    if metadata.get("ssm.dt_b_c_rms", False):
        config["architectures"] = ["FalconMambaForCausalLM"]
    config |= {
        "expand": _expand(metadata, config), "state_size": metadata.number("ssm.state_size"),
        "conv_kernel": metadata.number("ssm.conv_kernel"), "time_step_rank": metadata.number("ssm.time_step_rank"),
        "use_bias": _has(tensors, "ssm_in.bias"), "use_conv_bias": _has(tensors, "ssm_conv1d.bias"),
    }  # fmt: skip


def _mamba2(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    config |= {
        "expand": _expand(metadata, config), "state_size": metadata.number("ssm.state_size"),
        "conv_kernel": metadata.number("ssm.conv_kernel"), "num_heads": metadata.number("ssm.time_step_rank"),
        "head_dim": _head_dim(metadata), "n_groups": metadata.number("ssm.group_count"),
        "use_bias": _has(tensors, "ssm_in.bias"), "use_conv_bias": _has(tensors, "ssm_conv1d.bias"),
    }  # fmt: skip


def _beside(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """Mamba-2 where attention is, too."""
    config |= {
        "mamba_n_heads": metadata.number("ssm.time_step_rank"), "mamba_d_head": _head_dim(metadata),
        "mamba_n_groups": metadata.number("ssm.group_count"), "mamba_d_state": metadata.number("ssm.state_size"),
        "mamba_d_conv": metadata.number("ssm.conv_kernel"), "mamba_proj_bias": _has(tensors, "ssm_in.bias"),
        "mamba_conv_bias": _has(tensors, "ssm_conv1d.bias"),
    }  # fmt: skip


def _granite(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """Layers without key heads keep states. Queries and keys turn unless the file says otherwise."""
    _beside(metadata, config, tensors)
    heads = _by_layer(metadata, "attention.head_count_kv", config["num_hidden_layers"])
    config["layer_types"] = ["attention" if count else "mamba" for count in heads]
    config["mamba_expand"] = _expand(metadata, config)
    config["position_embedding_type"] = "rope" if metadata.get("rope.scaling.finetuned", True) else "nope"
    config["shared_intermediate_size"] = _rows(tensors, ("ffn_up_shexp.weight", "ffn_up.weight"))
    metadata.get("expert_shared_feed_forward_length")
    if not config.setdefault("num_local_experts", 0):
        config.pop("num_experts_per_tok", None)
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config.setdefault("attention_multiplier", size**-0.5)


def _falcon(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """Files have the numbers that parts of the model are multiplied by in the weights."""
    _beside(metadata, config, tensors)
    config["mamba_d_ssm"] = metadata.number("ssm.inner_size")
    config["mamba_rms_norm"], config["mamba_norm_before_gate"] = _has(tensors, "ssm_norm.weight"), False
    config["projectors_bias"] = _has(tensors, "ssm_out.bias")


def _nemotron(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """Layers with key heads attend, those with an inner size feed forward, the others keep states."""
    layers = config.pop("num_hidden_layers")
    heads = _by_layer(metadata, "attention.head_count_kv", layers)
    inner = _by_layer(metadata, "feed_forward_length", layers)
    sparse = "moe" if "n_routed_experts" in config else "mlp"
    config["layers_block_type"] = [
        "attention" if count else sparse if size else "mamba" for count, size in zip(heads, inner, strict=True)
    ]
    config["num_key_value_heads"] = max(heads) or config["num_attention_heads"]
    if any(inner) and sparse == "mlp":
        config["intermediate_size"] = max(inner)
    config |= {
        "mamba_num_heads": metadata.number("ssm.time_step_rank"), "mamba_head_dim": _head_dim(metadata),
        "n_groups": metadata.number("ssm.group_count"), "ssm_state_size": metadata.number("ssm.state_size"),
        "conv_kernel": metadata.number("ssm.conv_kernel"), "use_bias": _has(tensors, "ssm_in.bias"),
        "use_conv_bias": _has(tensors, "ssm_conv1d.bias"), "mlp_bias": _has(tensors, "ffn_up.bias"),
    }  # fmt: skip
    if len({size for size in inner if size}) > 1 or len({count for count in heads if count}) > 1:
        raise ConfigError("layers of one kind but different sizes are not supported", "model")


def _qwen(metadata: Metadata, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """Every so many layers one attends. Older files have the projection of the others as checkpoints do."""
    heads = metadata.number("ssm.time_step_rank")
    config |= {
        "linear_conv_kernel_dim": metadata.number("ssm.conv_kernel"), "linear_num_value_heads": heads,
        "linear_num_key_heads": metadata.number("ssm.group_count"), "linear_value_head_dim": _head_dim(metadata),
        "linear_key_head_dim": metadata.number("ssm.state_size"),
        "full_attention_interval": metadata.get("full_attention_interval", 4),
        "split_projections": not _has(tensors, "ssm_in.weight"),
    }  # fmt: skip


_STILL: Any = {"turns": False, "bias": None}
_MAMBA2 = GgufFamily(
    "Mamba2ForCausalLM", _ALONE, bare=_bare("mixer"), prefix="backbone.", eps="layer_norm_epsilon", idle=_ATTENTION,
    lifted={"ssm_conv1d": (1, 3)}, flat=("ssm_a", "ssm_d", "ssm_norm"), read=_mamba2, **_STILL,
)  # fmt: skip
_NEMOTRON = replace(
    _MAMBA2, architecture="NemotronHForCausalLM", sized=True, idle=("feed_forward_length", "attention.head_count_kv"),
    names={
        **_ALONE, "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
    },
    read=_nemotron,
)  # fmt: skip
STATES: dict[str, GgufFamily] = {
    "mamba": replace(
        _MAMBA2, architecture="MambaForCausalLM", flat=(), read=_mamba,
        names={**_ALONE, "ssm_dt.bias": "mixer.dt_proj.bias", "ssm_dt": "mixer.dt_proj", "ssm_x": "mixer.x_proj"},
    ),
    "mamba2": _MAMBA2,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(
        _NEMOTRON,
        names={
            **_NEMOTRON.names, "ffn_gate_inp": "mixer.gate", "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
            "ffn_up_exps": "mixer.experts.{}.up_proj", "ffn_down_exps": "mixer.experts.{}.down_proj",
            "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
            "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        keys={
            "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_group_count": "n_group",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_group_used_count": "topk_group", "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor", "moe_latent_size": "moe_latent_size",
        },
        neutral={"expert_shared_count": (1,), "expert_gating_func": (0, SIGMOID)},
    ),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM",
        {
            **_names("mamba"), "ffn_gate": "shared_mlp.gate_proj", "ffn_up": "shared_mlp.up_proj",
            "ffn_down": "shared_mlp.output_linear", "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_shexp": "block_sparse_moe.shared_mlp.gate_proj",
            "ffn_up_shexp": "block_sparse_moe.shared_mlp.up_proj",
            "ffn_down_shexp": "block_sparse_moe.shared_mlp.down_proj",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
            "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
            "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
        },
        bare=_bare("mamba"), pairs=True, some_attend=True, fixed={"split_projections": True},
        keys={
            "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
            "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        },
        lifted={"ssm_conv1d": (1, 3)}, flat=("ssm_a", "ssm_d", "ssm_norm"),
        neutral={"expert_weights_norm": (True,)}, read=_granite,
    ),
    "falcon-h1": GgufFamily(
        "FalconH1ForCausalLM",
        {
            **_names("mamba"), "ffn_norm": "pre_ff_layernorm", "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
            "output_norm.weight": "final_layernorm.weight",
        },
        bare={**_bare("mamba"), "ffn_norm": "pre_ff_layernorm.weight"}, mlp_bias=True, sized=True,
        lifted={"ssm_conv1d": (1, 3)}, flat=("ssm_a", "ssm_d", "ssm_norm"), read=_falcon,
    ),
    "qwen3next": GgufFamily(
        "Qwen3NextForCausalLM",
        {
            **_names("linear_attn"), "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba",
            "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
            "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        bare=_bare("linear_attn"), plus_one=True, partial=True, sized=True, ahead=True, lifted={"ssm_conv1d": (1, 3)},
        keys={
            "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        fixed={"norm_topk_prob": True}, neutral={"expert_weights_norm": (True,)}, read=_qwen,
    ),
}  # fmt: skip
