"""Families whose code transformers does not have: their checkpoints made of those of one that computes the same."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]
Config = dict[str, Any]


def renamed(state: State, *pairs: tuple[str, str]) -> State:
    """Pieces of names replaced, in turn."""
    result = {}
    for name, tensor in state.items():
        for old, new in pairs:
            name = re.sub(old, new, name)
        result[name] = tensor
    return result


def together(state: State, into: str, heads: int, kv_heads: int, *, by_head: bool) -> State:
    """q, k and v as one, whose module is called `into`."""
    result = {name: tensor for name, tensor in state.items() if not re.search(r"\.[qkv]_proj\.", name)}
    for name, q in state.items():
        if ".q_proj." not in name:
            continue
        parts = [state[name.replace("q_proj", f"{which}_proj")] for which in "qkv"]
        if by_head:
            rest, dim = q.shape[1:], q.shape[0] // heads
            cut = [part.view(kv_heads, -1, dim, *rest) for part in parts]
            result[name.replace("q_proj", into)] = torch.cat(cut, 1).reshape(-1, *rest)
        else:
            result[name.replace("q_proj", into)] = torch.cat(parts)
    return result


def internlm(state: State, config: Config) -> tuple[State, Config]:
    return state, {**config, "architectures": ["InternLMForCausalLM"], "bias": config.pop("attention_bias")}


def internlm2(state: State, config: Config) -> tuple[State, Config]:
    state = together(state, "wqkv", config["num_attention_heads"], config["num_key_value_heads"], by_head=True)
    state = renamed(
        state, ("embed_tokens", "tok_embeddings"), ("self_attn", "attention"), ("o_proj", "wo"),
        ("mlp", "feed_forward"), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"),
        ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"), ("lm_head", "output"),
    )  # fmt: skip
    bias = config.pop("attention_bias")
    return state, {**config, "architectures": ["InternLM2ForCausalLM"], "bias": bias}


def internlm3(state: State, config: Config) -> tuple[State, Config]:
    bias, out_bias = config.pop("attention_bias"), config.pop("attention_out_bias")
    assert out_bias == config.pop("mlp_bias")
    return state, {**config, "architectures": ["InternLM3ForCausalLM"], "qkv_bias": bias, "bias": out_bias}


def minicpm(state: State, config: Config) -> tuple[State, Config]:
    own = {
        "scale_emb": config.pop("embedding_multiplier"),
        "scale_depth": config.pop("residual_multiplier") * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": round(config["hidden_size"] / config.pop("logits_scaling")),
    }
    assert config.pop("attention_multiplier") == (config["hidden_size"] // config["num_attention_heads"]) ** -0.5
    return state, {**config, "architectures": ["MiniCPMForCausalLM"], **own}


def mimo(state: State, config: Config) -> tuple[State, Config]:
    state = {**state, "model.mtp_layers.0.mlp.up_proj.weight": torch.ones(3)}
    own = {"attention_bias": True, "num_nextn_predict_layers": 1}
    return state, {**config, "architectures": ["MiMoForCausalLM"], **own}


def exaone(state: State, config: Config) -> tuple[State, Config]:
    state = renamed(
        state, (r"^model\.", "transformer."), ("embed_tokens", "wte"), (r"\.layers\.", ".h."),
        ("input_layernorm", "ln_1"), ("self_attn", "attn.attention"), ("o_proj", "out_proj"),
        ("post_attention_layernorm", "ln_2"), ("gate_proj", "c_fc_0"), ("up_proj", "c_fc_1"), ("down_proj", "c_proj"),
        (r"transformer\.norm", "transformer.ln_f"),
    )  # fmt: skip
    own = {
        "num_layers": config.pop("num_hidden_layers"),
        "activation_function": config.pop("hidden_act"),
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
    }
    return state, {**config, "architectures": ["ExaoneForCausalLM"], **own}


def qwen(state: State, config: Config) -> tuple[State, Config]:
    heads = config["num_attention_heads"]
    state = renamed(
        together(state, "c_attn", heads, heads, by_head=False), (r"^model\.", "transformer."), ("embed_tokens", "wte"),
        (r"\.layers\.", ".h."), ("input_layernorm", "ln_1"), ("self_attn", "attn"), ("o_proj", "c_proj"),
        ("post_attention_layernorm", "ln_2"), ("gate_proj", "w2"), ("up_proj", "w1"), ("down_proj", "c_proj"),
        (r"transformer\.norm", "transformer.ln_f"),
    )  # fmt: skip
    for key in ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"):
        config.pop(key)
    own = {
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "intermediate_size": 2 * config["intermediate_size"],
        "seq_length": 128,
        "kv_channels": config["hidden_size"] // heads,
    }
    return state, {**config, "architectures": ["QWenLMHeadModel"], **own}


def orion(state: State, config: Config) -> tuple[State, Config]:
    eps = config.pop("layer_norm_eps")
    return state, {**config, "architectures": ["OrionForCausalLM"], "rms_norm_eps": eps}


def chatglm(state: State, config: Config) -> tuple[State, Config]:
    heads, kv_heads = config["num_attention_heads"], config.pop("num_key_value_heads")
    state = renamed(
        together(state, "query_key_value", heads, kv_heads, by_head=False),
        (r"^model\.embed_tokens", "transformer.embedding.word_embeddings"),
        (r"^model\.norm", "transformer.encoder.final_layernorm"), (r"^model\.", "transformer.encoder."),
        ("self_attn", "self_attention"), ("o_proj", "dense"), ("gate_up_proj", "dense_h_to_4h"),
        ("down_proj", "dense_4h_to_h"), ("lm_head", "transformer.output_layer"),
    )  # fmt: skip
    own = {
        "num_layers": config.pop("num_hidden_layers"),
        "padded_vocab_size": config.pop("vocab_size"),
        "ffn_hidden_size": config.pop("intermediate_size"),
        "kv_channels": config.pop("head_dim"),
        "seq_length": config.pop("max_position_embeddings"),
        "layernorm_epsilon": config.pop("rms_norm_eps"),
        "add_qkv_bias": config.pop("attention_bias"),
        "multi_query_attention": True,
        "multi_query_group_num": kv_heads,
        "rope_ratio": config.pop("rope_parameters")["rope_theta"] / 10000,
    }
    return state, {**config, "architectures": ["ChatGLMModel"], **own}


def deepseek(state: State, config: Config) -> tuple[State, Config]:
    """The shared experts' gate is half open for all tokens."""
    for name in [name for name in state if "shared_expert_gate" in name]:
        assert not state.pop(name).any()
    for name in [name for name in state if "shared_expert.down_proj" in name]:
        state[name] = state[name] / 2
    state = renamed(state, ("shared_expert", "shared_experts"))
    dense = config.pop("mlp_only_layers")
    assert dense == [0]
    assert not config.pop("qkv_bias")
    for key in ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "decoder_sparse_step"):
        config.pop(key)
    own = {
        "n_routed_experts": config.pop("num_experts"),
        "n_shared_experts": config.pop("shared_expert_intermediate_size") // config["moe_intermediate_size"],
        "first_k_dense_replace": 1,
    }
    return state, {**config, "architectures": ["DeepseekForCausalLM"], **own}


def baichuan(state: State, config: Config) -> tuple[State, Config]:
    """Of 7B."""
    heads = config["num_attention_heads"]
    config.pop("num_key_value_heads"), config.pop("attention_bias"), config.pop("mlp_bias"), config.pop("head_dim")
    own = {"architectures": ["BaiChuanForCausalLM"], "model_max_length": config["max_position_embeddings"]}
    return together(state, "W_pack", heads, heads, by_head=False), {**config, **own}


def baichuan_alibi(state: State, config: Config) -> tuple[State, Config]:
    """Of 13B."""
    state, config = baichuan(state, config)
    config.pop("max_position_embeddings")
    return state, {**config, "architectures": ["BaichuanForCausalLM"]}


def with_slopes(model: Any) -> Any:
    """Llama that knows of positions by slopes alone: all tokens are at position 0, and masks hold the slopes (ALiBi as
    its authors' code has it)."""
    forward, heads = model.forward, model.config.num_attention_heads
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** -(8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2 ** -(8 * (head + 0.5) / whole) for head in range(heads - whole)]

    def computed(ids: torch.Tensor) -> Any:
        token = torch.arange(ids.shape[1], device=ids.device)
        bias = torch.tensor(slopes, device=ids.device)[:, None, None] * (token - token[:, None])
        bias = bias.masked_fill(token > token[:, None], torch.finfo(torch.float32).min)
        return forward(ids, attention_mask=bias[None].to(model.dtype), position_ids=torch.zeros_like(ids))

    model.forward = computed
    return model


def computing(turned: str, model: Any) -> Any:
    """What it computes once it is turned, if that is something else."""
    return with_slopes(model) if turned == "baichuan_alibi" else model


TWINS: dict[str, Callable[[State, Config], tuple[State, Config]]] = {
    made.__name__: made
    for made in (
        internlm, internlm2, internlm3, minicpm, mimo, exaone, qwen, orion, chatglm, deepseek, baichuan, baichuan_alibi,
    )
}  # fmt: skip


def turn(family: str, folder: Path) -> None:
    """Make a saved checkpoint one of another family's."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    state, config = TWINS[family](load_file(weights), json.loads(file.read_text()))
    del config["model_type"]
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights)
    file.write_text(json.dumps(config))
