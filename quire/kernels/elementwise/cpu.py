"""What stands between the matrix products, on a CPU: float32 inside, in as few passes over memory as torch allows.

Same contracts as `norm`, `activation` and `rope`, whose references say what is computed; here is how to do it at
half the time or less. Sums of squares go through `vector_norm`, the one reduction that needs no squared copy.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * _inverse_rms(wide, eps)).mul_(weight).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)


def qk_norm_rope_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    interleaved: bool = False,
    norm_last: bool = False,
) -> torch.Tensor:
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    qk, v = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
    qk, angles = qk.float(), cos_sin[positions.long()].unsqueeze(1)  # queries and keys go through everything together
    if norm_last:
        qk = _rotate(qk, angles, interleaved)
    if q_weight is not None and k_weight is not None:
        weights = torch.cat([q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)])
        qk = (qk * _inverse_rms(qk, eps)).mul_(weights)
    if not norm_last:
        qk = _rotate(qk, angles, interleaved)
    qk = qk.to(qkv.dtype)
    k = qk[:, num_heads:]
    if slots.numel() and slots.min() < 0:
        real = slots >= 0
        slots, k, v = slots[real], k[real], v[real]
    blocks, offsets = slots.long() // k_cache.shape[2], slots.long() % k_cache.shape[2]
    k_cache.transpose(1, 2)[blocks, offsets] = k
    v_cache.transpose(1, 2)[blocks, offsets] = v
    return qk[:, :num_heads]


def _inverse_rms(wide: torch.Tensor, eps: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return norm.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [tokens, heads, head_dim], cos_sin [tokens, 1, rotary_dim], both float32."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    y = torch.empty_like(x)
    first, second, rest = _halves(x, cos.shape[-1], interleaved)
    y_first, y_second, y_rest = _halves(y, cos.shape[-1], interleaved)
    torch.mul(first, cos, out=y_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=y_second).addcmul_(first, sin)
    y_rest.copy_(rest)
    return y


def _halves(x: torch.Tensor, half: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The columns that are turned with one another, and the rest."""
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return first, second, rest
