"""Attention both ways within prompts that lie one behind the other: encoders."""

from __future__ import annotations

import itertools

import torch

from quire.kernels.dispatch import on_triton


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    num_rows: int,
    max_len: int,
    scale: float,
    out: torch.Tensor,
    *,
    window: int = 0,
    num_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token attends to all tokens of its row, itself included.

    q: [tokens, heads, head_dim]; k and v, of like strides: [tokens or more, KV heads, head_dim]; the last two dims are
    contiguous. query_start: int32 [rows + 1]; max_len: of any row; out: [tokens, heads * head_dim], which is returned.
    window: only to those less than so many tokens away; 0: to all. num_keys: int32 [rows], only to so many of the row's
    first tokens; of what then sees none nothing is promised but that it is a number.
    """
    if not on_triton(q):
        return out.copy_(attend_reference(q, k, v, query_start, scale, window=window, num_keys=num_keys))
    from quire.kernels.attention.triton import prompt as prompt_attention

    return prompt_attention.attend(
        q, k, v, query_start, num_rows, max_len, scale, out, window=window, num_keys=num_keys
    )


def attend_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    num_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same, row by row in float32."""
    group = q.shape[1] // k.shape[1]
    starts = query_start.tolist()
    keys = [None] * (len(starts) - 1) if num_keys is None else num_keys.tolist()
    parts = []
    for (start, end), count in zip(itertools.pairwise(starts), keys, strict=True):
        rows = (x[start:end].float().transpose(0, 1) for x in (q, k, v))
        q_row, k_row, v_row = (x if i == 0 else x.repeat_interleave(group, 0) for i, x in enumerate(rows))
        places = torch.arange(end - start, device=q.device)
        seen = (places < (end - start if count is None else count)).expand(end - start, -1)
        if window:
            seen = seen & ((places[:, None] - places).abs() < window)
        scores = (q_row @ k_row.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        weights = scores.softmax(-1).nan_to_num(0.0)  # NaN: a token that sees none
        parts.append((weights @ v_row).transpose(0, 1).reshape(end - start, -1))
    return torch.cat(parts)
