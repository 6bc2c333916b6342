"""A small Qwen3 for training: Hugging Face's parameter names, packed documents, no padding.

Inference is Quire's business; this module only needs to be short and to keep a GPU busy.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from torch.nn.attention.varlen import varlen_attn

    HAS_VARLEN = True
except ImportError:  # older PyTorch: the masked path below still works
    HAS_VARLEN = False


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network; the defaults are the shipped model's."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048


class Packing(NamedTuple):
    """Where documents lie in a flat run of tokens."""

    positions: Tensor  # [tokens], counted from each document's start
    starts: Tensor  # [documents + 1] cumulative lengths, int32
    mask: Tensor | None  # [tokens, tokens], only where no variable-length kernel exists


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * scaled.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], packing: Packing) -> Tensor:
        tokens, dim = x.shape[0], self.config.head_dim
        q = _rotate(self.q_norm(self.q_proj(x).view(tokens, -1, dim)), *rope)
        k = _rotate(self.k_norm(self.k_proj(x).view(tokens, -1, dim)), *rope)
        v = self.v_proj(x).view(tokens, -1, dim)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return self.o_proj(_attend(q, k, v, packing, self.config.max_position_embeddings).reshape(tokens, -1))


if HAS_VARLEN:  # the flag for causality was renamed between releases
    _renamed = "is_causal" not in inspect.signature(varlen_attn).parameters
    _CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if _renamed else {"is_causal": True}


def _attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing, longest: int) -> Tensor:
    if packing.mask is None:
        return varlen_attn(q, k, v, packing.starts, packing.starts, longest, longest, **_CAUSAL)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=packing.mask).squeeze(0).transpose(0, 1)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], packing: Packing) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, packing)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """Token ids in, weighted next-token loss out. The parameter names are those of `Qwen3ForCausalLM`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers)),
                "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
            }
        )
        scale = (2 * config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 * (scale if residual else 1.0))

    def hidden(self, ids: Tensor, packing: Packing) -> Tensor:
        half = self.config.head_dim // 2
        exponents = torch.arange(half, device=ids.device, dtype=torch.float32) / half
        angles = packing.positions[:, None].float() * self.config.rope_theta**-exponents
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        rope = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        x = self.model["embed_tokens"](ids).to(self.dtype)
        for layer in self.model["layers"]:
            x = layer(x, rope, packing)
        return self.model["norm"](x)

    def forward(self, ids: Tensor, targets: Tensor, weights: Tensor, packing: Packing) -> Tensor:
        logits = F.linear(self.hidden(ids, packing), self.model["embed_tokens"].weight)
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        return (losses * weights).sum() / weights.sum()

    def hf_config(self, eos: list[int], pad: int) -> dict[str, Any]:
        """The config.json under which Hugging Face loads these weights."""
        c = self.config
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **vars(c),
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": c.num_hidden_layers,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": eos[0],
            "pad_token_id": pad,
            "dtype": "bfloat16",
        }
