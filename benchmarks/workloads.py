"""The work that engines are compared on: model shapes, prompts, lengths. A pure function of seeds.

T1  256 requests, input and output uniform in 100…1024       T1b 1,000 requests, input 32…1024, output 32…512
T2  decode: a batch of 128-token prompts, 256 tokens each     T3  prefill: n prompts of one length, one token each
T4  256 requests that share 4,096 tokens, 64 of their own, 64 out
T5  Poisson arrivals over HTTP, log-normal lengths            T6  start-up: process start to first token
Weights are random; token ids lie where every model has them. Nothing here imports an engine.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Request = tuple[list[int], int]  # token ids, output length

FIRST_ID, END_ID = 256, 120_000
T2_BATCHES = (1, 8, 64)
T3_LENGTHS = (1024, 8192, 32768)
T3_MANY = (16, 4096)

_SHARED: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "head_dim": 128,
}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_SHARED,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "llama-3.1-8b": {
        **_SHARED,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
}


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        **MODELS["qwen3-0.6b"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


def _llama(hidden: int, inner: int, layers: int, heads: int, dim: int) -> dict[str, Any]:
    return {
        **MODELS["llama-3.1-8b"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": dim,
        "tie_word_embeddings": True,
    }


MODELS["nemotron-h-8b"] = {
    **_SHARED,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "vocab_size": 131072,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS["mamba2-2.7b"] = {  # with another vocabulary, so that all ids of these workloads are in it
    "torch_dtype": "bfloat16",
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 2560,
    "num_hidden_layers": 64,
    "num_heads": 80,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "vocab_size": 131072,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS["qwen3-next-12-layers"] = {  # a quarter of the 80B model's
    **_SHARED,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5632,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262144,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
MODELS["llama-3.2-1b"] = _llama(2048, 8192, 16, 32, 64)
MODELS["qwen3-1.7b"] = _qwen3(2048, 6144, 28, 16, tied=True)
MODELS["llama-3.2-3b"] = _llama(3072, 8192, 28, 24, 128)
MODELS["qwen3-4b"] = _qwen3(2560, 9728, 36, 32, tied=True)
MODELS["qwen2.5-7b"] = {
    **_qwen3(3584, 18944, 28, 28, tied=False),
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
MODELS["qwen3-14b"] = _qwen3(5120, 17408, 40, 40, tied=False)
MODELS["qwen3-32b"] = _qwen3(5120, 25600, 64, 64, tied=False)
MODELS["qwen3-30b-a3b"] = {
    **_qwen3(2048, 6144, 48, 32, tied=False),
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS["gpt-oss-20b"] = {  # its experts in bfloat16
    **_SHARED,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072,
    "bos_token_id": 199998,
    "eos_token_id": 200002,
}
MODELS["mixtral-8x7b"] = {
    **{key: value for key, value in MODELS["llama-3.1-8b"].items() if key not in ("rope_scaling", "attention_bias")},
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "rope_theta": 1000000.0,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS["olmoe-1b-7b"] = {
    **MODELS["llama-3.1-8b"],
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 1024,
    "vocab_size": 50304,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS["deepseek-v2-lite"] = {  # with V3's vocabulary, so that all ids of these workloads are in it
    **{key: value for key, value in _SHARED.items() if key != "head_dim"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10944,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "max_position_embeddings": 163840,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
MODELS["llama-3.3-70b"] = {
    **MODELS["llama-3.1-8b"],
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
MODELS["gemma-3-12b"] = {
    **_SHARED,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "intermediate_size": 15360,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 262208,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
    "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(48)],
    "max_position_embeddings": 131072,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
MODELS["gemma-3-12b-without-windows"] = {**MODELS["gemma-3-12b"], "layer_types": ["full_attention"] * 48}
MODELS["tiny-qwen3"] = {
    **MODELS["qwen3-0.6b"],
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
}


# Formats in which a model is published, as its config.json says: of these models the experts alone are in codes.
PUBLISHED: dict[tuple[str, str | None], dict[str, Any]] = {
    ("gpt-oss-20b", "mxfp4"): {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip


def config_of(model: str) -> dict[str, Any]:
    """Of a model's name, which may say how it is quantized: "llama-3.1-8b+fp8", "llama-3.1-8b+fp8+fp8kv"."""
    name = model.partition("+")[0]
    published = PUBLISHED.get((name, quantization_of(model)))
    return MODELS[name] if published is None else {**MODELS[name], "quantization_config": published}


# Of a weight, with its share of scales.
BYTES: dict[str | None, float] = {
    None: 2, "fp8": 1, "fp8_block": 1 + 4 / 128, "int8": 1, "int4": 0.5 + 2 / 128, "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16, "nf4": 0.5 + 4 / 64,
}  # fmt: skip


def quantization_of(model: str) -> str | None:
    return next((name for name in model.split("+")[1:] if name not in ("fp8kv", "state16")), None)


def kv_cache_dtype_of(model: str) -> str:
    """ "llama-3.1-8b+fp8+fp8kv" keeps its keys and values in 8 bits."""
    return "fp8" if "fp8kv" in model.split("+") else "auto"


def state_dtype_of(model: str) -> str:
    """ "nemotron-h-8b+state16" keeps the states of scans in 16 bits."""
    return "bfloat16" if "state16" in model.split("+") else "auto"


def write_model_dir(model: str, path: Path, *, tokenizer: bool = False) -> Path:
    """A folder with nothing but config.json: enough for `load_format="dummy"` and token-id prompts.

    tokenizer: also one in which every id of the model has a text, so that answers can be text.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_of(model), indent=1))
    if tokenizer:
        made = _made_up_tokenizer(config_of(model)["vocab_size"])
        (path / "tokenizer.json").write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
        (path / "tokenizer_config.json").write_text("{}")
    return path


def _made_up_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Byte-level, without merges: the 256 bytes, then words of a space and four letters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    words = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    space = chr(256 + others.index(ord(" ")))
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    words += [space + "".join(next(letters)) for _ in range(vocab_size - len(words))]
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
    }


def token_ids(rng: random.Random, count: int) -> list[int]:
    draw, span = rng.random, END_ID - FIRST_ID
    return [FIRST_ID + int(draw() * span) for _ in range(count)]


def _uniform(name: str, content: str, count: int, inputs: tuple[int, int], outputs: tuple[int, int]) -> list[Request]:
    lengths = random.Random(f"len-{name}")
    sizes = [(lengths.randint(*inputs), lengths.randint(*outputs)) for _ in range(count)]
    ids = random.Random(f"content-{content}")
    return [(token_ids(ids, size), out) for size, out in sizes]


def t1(round_: int = 0, seed: int = 0) -> list[Request]:
    """The lengths are the same in every round, the content is new."""
    return _uniform(f"t1-{seed}", f"t1-{seed}-{round_}", 256, (100, 1024), (100, 1024))


def t1b(round_: int = 0, seed: int = 0) -> list[Request]:
    return _uniform(f"t1b-{seed}", f"t1b-{seed}-{round_}", 1000, (32, 1024), (32, 512))


def warmup(seed: int = 0, count: int = 8, inputs: int = 64, outputs: int = 16) -> list[Request]:
    ids = random.Random(f"warmup-{seed}")
    return [(token_ids(ids, inputs), outputs) for _ in range(count)]


def t2(batch: int, round_: int = 0) -> list[Request]:
    ids = random.Random(f"t2-{batch}-{round_}")
    return [(token_ids(ids, 128), 256) for _ in range(batch)]


def at(context: int, batch: int, count: int) -> list[Request]:
    """A batch of prompts of `context` tokens, `count` tokens each."""
    ids = random.Random(f"at-{context}-{batch}")
    return [(token_ids(ids, context), count) for _ in range(batch)]


def steps(batch: int, count: int, round_: int = 0) -> list[Request]:
    """A batch of 64-token prompts, `count` tokens each."""
    ids = random.Random(f"steps-{batch}-{round_}")
    return [(token_ids(ids, 64), count) for _ in range(batch)]


def t3(length: int, count: int = 1, round_: int = 0) -> list[Request]:
    ids = random.Random(f"t3-{length}-{count}-{round_}")
    return [(token_ids(ids, length), 1) for _ in range(count)]


def t4(round_: int = 0, count: int = 256, shared: int = 4096, own: int = 64, out: int = 64) -> list[Request]:
    ids = random.Random(f"t4-{round_}")
    prefix = token_ids(ids, shared)
    return [(prefix + token_ids(ids, own), out) for _ in range(count)]


def t5(
    rate: float, duration: float = 25.0, inf_requests: int = 1000, seed: int = 0
) -> list[tuple[float, list[int], int]]:
    """(arrival in seconds, token ids, output length); an infinite rate sends `inf_requests` at once."""
    rng = random.Random(f"t5-{seed}-{float(rate)}")
    requests: list[tuple[float, list[int], int]] = []
    arrival = 0.0
    while True:
        if math.isinf(rate):
            if len(requests) >= inf_requests:
                return requests
        else:
            arrival += rng.expovariate(rate)
            if arrival > duration:
                return requests
        inputs = _lognormal(rng, 500, 16, 2048)
        outputs = _lognormal(rng, 200, 16, 1024)
        requests.append((arrival, token_ids(rng, inputs), outputs))


def _lognormal(rng: random.Random, mean: float, low: int, high: int, sigma: float = 0.7) -> int:
    value = rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
    return max(low, min(high, round(value)))


# -- floors -----------------------------------------------------------------------------------------------------


def experts_of(model: str) -> tuple[int, int, int] | None:
    """(experts, those that a token goes to, their inner size); None: a dense model."""
    c = config_of(model)
    experts = c.get("num_experts", c.get("num_local_experts", c.get("n_routed_experts")))
    return experts and (experts, c["num_experts_per_tok"], c.get("moe_intermediate_size", c["intermediate_size"]))


def experts_hit(experts: int, top_k: int, tokens: int) -> float:
    """By tokens that choose evenly and each by itself."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def feed_forward(model: str, tokens: int) -> float:
    """Weights of a layer that so many tokens meet, each counted once. All layers of a sparse model count as sparse."""
    c, sparse = config_of(model), experts_of(model)
    if not sparse:
        return 3.0 * c["hidden_size"] * c["intermediate_size"]
    experts, top_k, inner = sparse
    shared = c.get("n_shared_experts", "shared_expert_intermediate_size" in c)
    return c["hidden_size"] * (experts + 3 * inner * (shared + experts_hit(experts, top_k, tokens)))


def attention_of(model: str) -> tuple[int, int, int]:
    """Of a layer: weights, numbers that are kept of a token, and the least products that two tokens make."""
    c = config_of(model)
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" not in c:
        q, kv = heads * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        return 2 * hidden * q + 2 * hidden * kv, 2 * kv, 2 * q
    rank, nope, rope, value = (c[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q_rank = c["q_lora_rank"]
    queries = hidden * heads * (nope + rope) if q_rank is None else q_rank * (hidden + heads * (nope + rope))
    weights = queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    return weights, rank + rope, heads * (nope + rope + value)


def _is_hybrid(model: str) -> bool:
    return bool({"hybrid_override_pattern", "linear_num_value_heads", "state_size"} & config_of(model).keys())


def _hybrid(model: str, tokens: int) -> tuple[float, int, int, int]:
    """Of all layers of a model that has attention in some, state in some: weights that so many tokens meet, numbers
    kept of a token, the least products that two tokens make, numbers of a row's state."""
    c = config_of(model)
    hidden = c["hidden_size"]
    if "linear_num_value_heads" in c:
        layers, inner = c["num_hidden_layers"], c["linear_num_value_heads"] * c["linear_value_head_dim"]
        keys, full = c["linear_num_key_heads"] * c["linear_key_head_dim"], layers // c["full_attention_interval"]
        mixer = hidden * (2 * keys + 3 * inner + 2 * c["linear_num_value_heads"])
        others, attention = layers * feed_forward(model, tokens), attention_of(model)
        gates = hidden * c["num_attention_heads"] * c["head_dim"]  # of what attention makes
        attention = attention[0] + gates, *attention[1:]
        with_state, state = layers - full, inner * c["linear_key_head_dim"]
    else:
        kinds = c.get("hybrid_override_pattern", "M" * c.get("num_hidden_layers", 0))
        heads, dim, groups, size = (
            c[own if own in c else other]
            for own, other in (
                ("mamba_num_heads", "num_heads"), ("mamba_head_dim", "head_dim"), ("n_groups", ""),
                ("ssm_state_size", "state_size"),
            )
        )  # fmt: skip
        full, with_state, inner = kinds.count("*"), kinds.count("M"), heads * dim
        attention = attention_of(model) if full else (0, 0, 0)
        mixer = hidden * (2 * inner + 2 * groups * size + heads) + inner * hidden
        others, state = kinds.count("-") * 2.0 * hidden * c.get("intermediate_size", 0), inner * size
    weights = full * attention[0] + with_state * mixer + others
    return weights, full * attention[1], full * attention[2], with_state * state


def _head_bytes(model: str) -> int:
    """Of a model that is quantized while it loads the head has 8 bits, unless it is the embedding."""
    c = config_of(model)
    online = quantization_of(model) is not None and "quantization_config" not in c
    return c["vocab_size"] * c["hidden_size"] * (1 if online and not c["tie_word_embeddings"] else 2)


def decode_bytes(model: str, batch: int, context: int) -> tuple[int, int]:
    """(weight bytes, KV bytes) one decode step must read: every weight once, the head but not the embedding; of experts
    those that the rows' tokens may be thought to hit. A state is read and written."""
    c = config_of(model)
    of_number = 1 if kv_cache_dtype_of(model) == "fp8" else 2
    if _is_hybrid(model):
        every, kept, _, state = _hybrid(model, batch)
        both = 4 if state_dtype_of(model) == "bfloat16" else 8
        return int(2 * every) + _head_bytes(model) + both * batch * state, batch * context * of_number * kept
    layers, (weights, kept, _) = c["num_hidden_layers"], attention_of(model)
    of_experts = BYTES[quantization_of(model)]
    of_attention = BYTES[None] if "quantization_config" in c else of_experts
    layer = of_attention * weights + of_experts * int(feed_forward(model, batch))
    moved = int(layers * layer) + _head_bytes(model)
    windowed = c.get("layer_types", []).count("sliding_attention")
    tokens = (layers - windowed) * context + windowed * min(context, c.get("sliding_window") or context)
    return moved, batch * of_number * kept * tokens


def prefill_flops(model: str, count: int, length: int) -> float:
    """Matrix and causal-attention operations of `count` prompts; the head once a prompt."""
    c = config_of(model)
    if _is_hybrid(model):
        every, _, all_products, _ = _hybrid(model, 1)
        seen = all_products * length * length / 2
    else:
        layers, (weights, _, products) = c["num_hidden_layers"], attention_of(model)
        every = layers * (weights + feed_forward(model, 1))
        windowed = c.get("layer_types", []).count("sliding_attention")
        window = min(length, c.get("sliding_window") or length)
        seen = products * ((layers - windowed) * length**2 / 2 + windowed * window * (length - window / 2))
    attention = 2 * seen
    return count * (2 * every * length + attention + 2 * c["vocab_size"] * c["hidden_size"])


def seconds_floor(
    model: str, requests: Sequence[tuple[int, int]], bytes_per_s: float, flops_per_s: float, shared: int = 0
) -> float:
    """The least time for requests of (prompt, output) tokens that all come at once and decode in step.

    Prompts at the matrix rate; then each step at the memory's rate (weights once, every row's KV) or the matrix rate,
    whichever takes longer. shared: leading tokens that all prompts have in common: computed once, read once a step.
    """
    weights, kv_token = decode_bytes(model, 1, 1)
    plain, _ = decode_bytes(model.partition("+")[0], 1, 1)  # of experts those that one token goes to
    hybrid = _is_hybrid(model)
    by_rows = hybrid or experts_of(model) is not None
    products = _hybrid(model, 1)[2] if hybrid else attention_of(model)[2] * config_of(model)["num_hidden_layers"]
    own, outputs = np.array([prompt - shared for prompt, _ in requests]), np.array([output for _, output in requests])
    operations = sum(prefill_flops(model, 1, int(n)) + 2 * products * int(n) * shared for n in own)
    operations += prefill_flops(model, 1, shared) if shared else 0.0
    seconds = operations / flops_per_s
    for step in range(1, int(outputs.max())):  # the first token comes with the prompt
        going = outputs > step
        rows, contexts = int(going.sum()), int((own[going] + step).sum())
        moved = (decode_bytes(model, rows, 1)[0] if by_rows else weights) + kv_token * (contexts + shared)
        operations = plain * rows + 2 * products * (
            contexts + rows * shared
        )  # a plain weight: two bytes, two operations
        seconds += max(moved / bytes_per_s, operations / flops_per_s)
    return float(seconds)
