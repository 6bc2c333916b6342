"""What the format's usual converter does to whole checkpoints of some families before it names their tensors, and back.

After its description, without a line of the engine's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.gguf import states

State = dict[str, torch.Tensor]
Config = Mapping[str, Any]


def same(state: State, _: Config) -> State:
    return state


def _renamed(state: State, *pairs: tuple[str, str]) -> State:
    found = {}
    for name, tensor in state.items():
        for old, new in pairs:
            name = re.sub(old, new, name)
        found[name] = tensor
    return found


def corrected(state: State, _: Config) -> State:
    return _renamed(state, (r"e_score_correction_bias$", "e_score_correction.bias"))


def uncorrected(state: State, _: Config) -> State:
    return _renamed(state, (r"e_score_correction\.bias$", "e_score_correction_bias"))


def gpt_oss(state: State, _: Config) -> State:
    found = {}
    for name, tensor in state.items():
        if name.endswith("gate_up_proj"):
            turned = tensor.transpose(1, 2)
            found[name.replace("gate_up_proj", "gate_proj.weight")] = turned[:, ::2]
            found[name.replace("gate_up_proj", "up_proj.weight")] = turned[:, 1::2]
        elif name.endswith("gate_up_proj_bias"):
            found[name.replace("gate_up_proj_bias", "gate_proj.bias")] = tensor[:, ::2]
            found[name.replace("gate_up_proj_bias", "up_proj.bias")] = tensor[:, 1::2]
        elif name.endswith("down_proj"):
            found[f"{name}.weight"] = tensor.transpose(1, 2)
        else:
            found[name.replace("down_proj_bias", "down_proj.bias").replace("sinks", "sinks.weight")] = tensor
    return found


def gpt_oss_back(state: State, _: Config) -> State:
    found = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_proj.weight"):
            both = torch.stack([tensor, state[name.replace("gate", "up")]], dim=2).flatten(1, 2)
            found[name.replace("gate_proj.weight", "gate_up_proj")] = both.transpose(1, 2)
        elif name.endswith("experts.gate_proj.bias"):
            both = torch.stack([tensor, state[name.replace("gate", "up")]], dim=2)
            found[name.replace("gate_proj.bias", "gate_up_proj_bias")] = both.flatten(1)
        elif name.endswith("experts.down_proj.weight"):
            found[name.removesuffix(".weight")] = tensor.transpose(1, 2)
        elif "experts.up_proj" not in name:
            found[name.replace("down_proj.bias", "down_proj_bias").replace("sinks.weight", "sinks")] = tensor
    return found


def llama4(state: State, _: Config) -> State:
    found = {}
    for name, tensor in state.items():
        if name.endswith("gate_up_proj"):
            gate, up = tensor.transpose(1, 2).chunk(2, dim=1)
            found |= {name.replace("gate_up_proj", f"{n}_proj.weight"): t for n, t in (("gate", gate), ("up", up))}
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor.transpose(1, 2)
        else:
            found[name] = tensor
    return found


def llama4_back(state: State, _: Config) -> State:
    found = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_proj.weight"):
            both = torch.cat([tensor, state[name.replace("gate", "up")]], dim=1)
            found[name.replace("gate_proj.weight", "gate_up_proj")] = both.transpose(1, 2)
        elif name.endswith("experts.down_proj.weight"):
            found[name.removesuffix(".weight")] = tensor.transpose(1, 2)
        elif "experts.up_proj" not in name:
            found[name] = tensor
    return found


def granitemoe(state: State, _: Config) -> State:
    found = {}
    for name, tensor in state.items():
        if name.endswith("input_linear.weight"):
            base = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts.")
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
        else:
            found[name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")] = tensor
    return found


def granitemoe_back(state: State, _: Config) -> State:
    found = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_proj.weight"):
            both = torch.cat([tensor, state[name.replace("gate", "up")]], dim=1)
            found[name.replace("mlp.experts.gate_proj", "block_sparse_moe.input_linear")] = both
        elif "experts.up_proj" not in name:
            found[name.replace("mlp.experts.down_proj", "block_sparse_moe.output_linear")] = tensor
    return found


def latent(state: State, config: Config) -> State:
    """Keys' and values' halves, keys' turned."""
    found: State = {}
    heads = config["num_attention_heads"]
    for name, tensor in corrected(state, config).items():
        if name.endswith("kv_b_proj.weight"):
            sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
            keys, values = tensor.view(heads, sum(sizes), -1).split(sizes, dim=1)
            found[name.replace("kv_b", "k_b")] = keys.transpose(1, 2)
            found[name.replace("kv_b", "v_b")] = values
        else:
            found[name] = tensor
    return found


def latent_back(state: State, config: Config) -> State:
    found = {}
    for name, tensor in uncorrected(state, config).items():
        if name.endswith("k_b_proj.weight"):
            both = torch.cat([tensor.transpose(1, 2), state[name.replace("k_b", "v_b")]], dim=1)
            found[name.replace("k_b", "kv_b")] = both.flatten(0, 1)
        elif not name.endswith("v_b_proj.weight") or "kv_b" in name:
            found[name] = tensor
    return found


def squeezed(part: str, at: int) -> tuple[Callable[[State, Config], State], Callable[[State, Config], State]]:
    def there(state: State, _: Config) -> State:
        return {name: tensor.squeeze(at) if part in name else tensor for name, tensor in state.items()}

    def back(state: State, _: Config) -> State:
        return {name: tensor.unsqueeze(at) if part in name else tensor for name, tensor in state.items()}

    return there, back


def _ernie(state: State, config: Config) -> State:
    return corrected(squeezed("e_score", 0)[0](state, config), config)


def _ernie_back(state: State, config: Config) -> State:
    return uncorrected(squeezed("e_score", 0)[1](state, config), config)


def _lfm2moe(state: State, config: Config) -> State:
    return _renamed(
        squeezed("conv.conv", 1)[0](state, config),
        (r"expert_bias$", "expert_bias.bias"),
        (r"^model\.(.*\.experts\.)", r"\1"),
    )


def _lfm2moe_back(state: State, config: Config) -> State:
    return _renamed(
        squeezed("conv.conv", 1)[1](state, config), (r"expert_bias\.bias$", "expert_bias"), (r"^layers", "model.layers")
    )


def gemma3n(state: State, _: Config) -> State:
    """Projections of streams are one tensor; what is no matrix is called like one."""
    found: State = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"(model\.altup_(?:un)?\w*projections)\.(\d+)\.weight", name)
        if match is None:
            found[re.sub("_scale$", "_scale.weight", name)] = tensor
        elif match[2] == "0":
            count = sum(other.startswith(f"{match[1]}.") for other in state)
            found[f"{match[1]}.weight"] = torch.stack([state[f"{match[1]}.{n}.weight"] for n in range(count)])
    return found


def gemma3n_back(state: State, _: Config) -> State:
    found: State = {}
    for name, tensor in state.items():
        if re.search(r"altup_\w*projections", name):
            found |= {name.replace("weight", f"{n}.weight"): one for n, one in enumerate(tensor)}
        else:
            found[name.replace("_scale.weight", "_scale")] = tensor
    return found


def head_norms(state: State, _: Config) -> State:
    """StableLM's, one a head."""
    found: State = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"(.*_layernorm)\.norms\.(\d+)\.weight", name)
        if match is None:
            found[name] = tensor
        elif match[2] == "0":
            count = sum(other.startswith(f"{match[1]}.norms.") for other in state)
            found[f"{match[1]}.weight"] = torch.stack([state[f"{match[1]}.norms.{n}.weight"] for n in range(count)])
    return found


def head_norms_back(state: State, _: Config) -> State:
    found = {}
    for name, tensor in state.items():
        if re.search(r"[qk]_layernorm\.weight$", name):
            found |= {name.replace("weight", f"norms.{n}.weight"): row for n, row in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def without_head(state: State, _: Config) -> State:
    """Of an encoder."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("pooler.")}


CONVERSIONS: dict[str, tuple[Callable[[State, Config], State], Callable[[State, Config], State]]] = {
    "gpt-oss": (gpt_oss, gpt_oss_back),
    "llama4": (llama4, llama4_back),
    "granitemoe": (granitemoe, granitemoe_back),
    "deepseek2": (latent, latent_back),
    "deepseek2 of old": (corrected, uncorrected),
    "glm4moe": (corrected, uncorrected),
    "dots1": (corrected, uncorrected),
    "minimax-m2": (corrected, uncorrected),
    "ernie4_5-moe": (_ernie, _ernie_back),
    "lfm2": squeezed("conv.conv", 1),
    "lfm2moe": (_lfm2moe, _lfm2moe_back),
    **states.CONVERSIONS,
    "bert": (without_head, same),
    "gemma3n": (gemma3n, gemma3n_back),
    "stablelm": (head_norms, head_norms_back),
}
