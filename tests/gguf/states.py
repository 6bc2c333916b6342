"""What the format's usual converter does to families whose layers keep states, and what it says of them.

After its description, without a line of the engine's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

State = dict[str, torch.Tensor]
Config = Mapping[str, Any]
ATTENDING = ("attention", "full_attention")


def alone(config: Config, arch: str) -> dict[str, Any]:
    """Of models without attention."""
    found = {
        "context_length": 2**20, "feed_forward_length": 0, "attention.head_count": 0,
        "ssm.conv_kernel": config["conv_kernel"], "ssm.state_size": config["state_size"],
        "ssm.inner_size": config["expand"] * config["hidden_size"],
    }  # fmt: skip
    if arch == "mamba":
        normed = config["model_type"] == "falcon_mamba"
        return {**found, "ssm.time_step_rank": config["time_step_rank"], "ssm.dt_b_c_rms": normed}
    return {**found, "ssm.time_step_rank": config["num_heads"], "ssm.group_count": config["n_groups"]}


def beside(config: Config, arch: str) -> dict[str, Any]:
    """Of models that have attention, too."""
    if arch in ("granitehybrid", "falcon-h1"):
        inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
        found = {
            "ssm.conv_kernel": config["mamba_d_conv"], "ssm.state_size": config["mamba_d_state"],
            "ssm.inner_size": inner, "ssm.time_step_rank": config["mamba_n_heads"],
            "ssm.group_count": config["mamba_n_groups"],
        }  # fmt: skip
        if arch == "falcon-h1":
            return {**found, "embedding_scale": None}
        heads = [config["num_key_value_heads"] * (kind in ATTENDING) for kind in config["layer_types"]]
        turns = config["position_embedding_type"] == "rope"
        return {**found, "attention.head_count_kv": heads, "rope.scaling.finetuned": turns}
    if arch in ("nemotron_h", "nemotron_h_moe"):
        return _nemotron(config, arch)
    if arch == "qwen3next":
        heads = config["linear_num_value_heads"]
        return {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": heads,
            "ssm.inner_size": config["linear_value_head_dim"] * heads,
            "full_attention_interval": config.get("full_attention_interval", 4),
        }  # fmt: skip
    return {}


def _nemotron(config: Config, arch: str) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    feeding, inner = ("moe", "moe_intermediate_size") if arch == "nemotron_h_moe" else ("mlp", "intermediate_size")
    return {
        "block_count": len(kinds), "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"], "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind in ATTENDING) for kind in kinds],
        "feed_forward_length": [config[inner] * (kind == feeding) for kind in kinds],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        **({} if feeding == "moe" else _NO_EXPERTS),
    }  # fmt: skip


# Which a checkpoint without experts says all the same, and the converter of one without does not.
_NO_EXPERTS = {
    "expert_count": None, "expert_used_count": None, "expert_feed_forward_length": None, "expert_group_count": None,
    "expert_shared_feed_forward_length": None, "expert_weights_scale": None, "expert_weights_norm": None,
    "expert_group_used_count": None, "expert_shared_count": None,
}  # fmt: skip


def states(state: State, config: Config) -> State:
    """What fades is stored as it is; numbers of heads and weights of norms have two dimensions."""
    groups = config.get("n_groups") or config.get("mamba_n_groups") or 1
    one = config["model_type"] in ("mamba", "falcon_mamba", "qwen3_next")
    found = {}
    for name, tensor in state.items():
        if name.endswith("A_log"):
            found[name] = -torch.exp(tensor) if one else -torch.exp(tensor)[:, None]
        elif name.endswith((".D", "mamba.norm.weight", "mixer.norm.weight")) and not one:
            found[name] = tensor[:, None] if name.endswith("D") else tensor.view(groups, -1)
        elif name.endswith("conv1d.weight"):
            found[name] = tensor.squeeze(1)
        else:
            found[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return _renamed(found, (r"e_score_correction_bias$", "e_score_correction.bias"))


def states_back(state: State, config: Config) -> State:
    one = config["model_type"] in ("mamba", "falcon_mamba")
    found = {}
    for name, tensor in state.items():
        if name.endswith("A_log"):
            found[name] = torch.log(-tensor) if one else torch.log(-tensor).flatten()
        elif name.endswith((".D", "mamba.norm.weight", "mixer.norm.weight")):
            found[name] = tensor.flatten()
        elif name.endswith("conv1d.weight"):
            found[name] = tensor.unsqueeze(1)
        else:
            found[name if one else name.replace(".dt_proj.bias", ".dt_bias")] = tensor
    return _renamed(found, (r"e_score_correction\.bias$", "e_score_correction_bias"))


def _renamed(state: State, pair: tuple[str, str]) -> State:
    return {re.sub(pair[0], pair[1], name): tensor for name, tensor in state.items()}


_GRANITE = {"block_sparse_moe": "mlp.experts", "shared_mlp": "mlp.shared_experts"}


def granite(state: State, config: Config) -> State:
    """Gate and up apart; without experts the feed-forward layer is one like any other."""
    dense = not config["num_local_experts"]
    found = {}
    for name, tensor in states(state, config).items():
        for theirs, ours in {**_GRANITE, **({"shared_mlp": "mlp"} if dense else {})}.items():
            if f"{theirs}.input_linear" in name:
                gate, up = tensor.chunk(2, dim=-2)
                base = name.replace(f"{theirs}.input_linear.weight", ours)
                found |= {f"{base}.gate_proj.weight": gate, f"{base}.up_proj.weight": up}
                break
            if f"{theirs}.output_linear" in name:
                found[name.replace(f"{theirs}.output_linear", f"{ours}.down_proj")] = tensor
                break
        else:
            found[name] = tensor
    return found


def granite_back(state: State, config: Config) -> State:
    dense = not config["num_local_experts"]
    found = {}
    for name, tensor in states_back(state, config).items():
        match = re.fullmatch(r"(.*\.)mlp(\.experts|\.shared_experts|)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            found[name] = tensor
            continue
        theirs = "block_sparse_moe" if match[2] == ".experts" else "shared_mlp"
        assert dense == (match[2] == "")
        if match[3] == "gate":
            both = torch.cat([tensor, state[name.replace("gate", "up")]], dim=-2)
            found[f"{match[1]}{theirs}.input_linear.weight"] = both
        elif match[3] == "down":
            found[f"{match[1]}{theirs}.output_linear.weight"] = tensor
    return found


def _factors(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """What Falcon-H1's tensors are multiplied by."""
    gate, down = config["mlp_multipliers"]
    attends = config["attention_in_multiplier"]
    for part, factor in {
        "down_proj.weight": down, "gate_proj.weight": gate, "k_proj.weight": config["key_multiplier"] * attends,
        "q_proj.weight": attends, "v_proj.weight": attends, "o_proj.weight": config["attention_out_multiplier"],
        "out_proj.weight": config["ssm_out_multiplier"], "lm_head.weight": config["lm_head_multiplier"],
        "embed_tokens.weight": config["embedding_multiplier"],
    }.items():  # fmt: skip
        if name.endswith(f".{part}") or name == part:
            return torch.tensor(factor)
    if not name.endswith("in_proj.weight"):
        return torch.tensor(1.0)
    shared, inner = config["mamba_n_groups"] * config["mamba_d_state"], config["mamba_d_ssm"]
    counts = torch.tensor([inner, inner, shared, shared, config["mamba_n_heads"]])
    rows = torch.repeat_interleave(torch.tensor(config["ssm_multipliers"]), counts)
    assert len(rows) == len(tensor)
    return rows[:, None] * config["ssm_in_multiplier"]


def falcon(state: State, config: Config) -> State:
    return states({name: tensor * _factors(name, tensor, config) for name, tensor in state.items()}, config)


def falcon_back(state: State, config: Config) -> State:
    found = states_back(state, config)
    return {name: tensor / _factors(name, tensor, config) for name, tensor in found.items()}


def _sizes(config: Config) -> tuple[int, list[int]]:
    """Key heads, and rows of each that are queries, keys, values and gates."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    each = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    return keys, [size, size, each, each]


def qwen(state: State, config: Config) -> State:
    """Queries, keys and values of all heads one behind the other, gates apart."""
    heads, counts = _sizes(config)
    found = {}
    for name, tensor in states(state, config).items():
        if "in_proj_qkvz" in name:
            parts = tensor.view(heads, sum(counts), -1).split(counts, dim=1)
            q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
            found[name.replace("in_proj_qkvz", "in_proj_qkv")] = torch.cat([q, k, v])
            found[name.replace("in_proj_qkvz", "in_proj_z")] = z
        else:
            found[name] = tensor
    return found


def qwen_back(state: State, config: Config) -> State:
    heads, counts = _sizes(config)
    found = {}
    for name, tensor in states_back(state, config).items():
        if "in_proj_qkv." in name:
            rows = torch.cat([tensor, state[name.replace("in_proj_qkv", "in_proj_z")]])
            parts = rows.split([heads * count for count in counts])
            grouped = [part.view(heads, -1, tensor.shape[1]) for part in parts]
            found[name.replace("in_proj_qkv", "in_proj_qkvz")] = torch.cat(grouped, dim=1).flatten(0, 1)
        elif "in_proj_z" not in name:
            found[name] = tensor
    return found


def nemotron(state: State, config: Config) -> State:
    return _renamed(states(state, config), (r"^backbone\.(layers\.\d+\.)mixer\.experts", r"model.\1mlp.experts"))


def nemotron_back(state: State, config: Config) -> State:
    return _renamed(states_back(state, config), (r"^model\.(layers\.\d+\.)mlp\.experts", r"backbone.\1mixer.experts"))


CONVERSIONS: dict[str, tuple[Callable[[State, Config], State], Callable[[State, Config], State]]] = {
    "mamba": (states, states_back),
    "mamba2": (states, states_back),
    "nemotron_h": (states, states_back),
    "nemotron_h_moe": (nemotron, nemotron_back),
    "granitehybrid": (granite, granite_back),
    "falcon-h1": (falcon, falcon_back),
    "qwen3next": (qwen, qwen_back),
    "qwen3next of old": (states, states_back),
}
