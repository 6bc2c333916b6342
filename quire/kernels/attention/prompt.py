"""Attention both ways within prompts that lie one behind the other: encoders."""

from __future__ import annotations

import itertools

import torch

from quire.kernels.dispatch import on_triton


def attend(
    qkv: torch.Tensor,
    query_start: torch.Tensor,
    num_rows: int,
    max_len: int,
    heads: tuple[int, int, int],
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Each token attends to all tokens of its row, itself included.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], rows contiguous; query_start: int32 [rows + 1]; max_len: of any
    row; heads: (heads, KV heads, head_dim); out: [tokens, heads * head_dim], which is returned.
    """
    if not on_triton(qkv):
        return out.copy_(attend_reference(qkv, query_start, heads, scale))
    from quire.kernels.attention.triton import prompt as prompt_attention

    return prompt_attention.attend(qkv, query_start, num_rows, max_len, heads, scale, out)


def attend_reference(
    qkv: torch.Tensor, query_start: torch.Tensor, heads: tuple[int, int, int], scale: float
) -> torch.Tensor:
    """The same, row by row in float32."""
    num_heads, num_kv_heads, dim = heads
    parts = []
    starts = query_start.tolist()
    for start, end in itertools.pairwise(starts):
        row = qkv[start:end].float().view(end - start, -1, dim).transpose(0, 1)
        q, k, v = row.split([num_heads, num_kv_heads, num_kv_heads])
        k, v = (x.repeat_interleave(num_heads // num_kv_heads, 0) for x in (k, v))
        y = (q @ k.transpose(1, 2) * scale).softmax(-1) @ v
        parts.append(y.transpose(0, 1).reshape(end - start, -1))
    return torch.cat(parts)
