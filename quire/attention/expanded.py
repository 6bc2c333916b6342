"""Latent attention in the expanded form by torch's own kernels: what heads make of a row's latents, a few heads at a
time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.attention.base import AttentionInputs, AttentionSpec
from quire.kernels.attention.latent_expanded import pays

MADE_BYTES = 64 * 1024**2  # of keys and values at once, unless one head alone has more


def expands(spec: AttentionSpec, inputs: AttentionInputs) -> bool:
    """Whether the step has prompts that are attended for in this form."""
    work, tokens = inputs.prompts, inputs.num_tokens - inputs.num_decodes
    if spec.made is None or work is None or inputs.num_decodes == inputs.num_rows:
        return False
    return pays(work, tokens, spec.value_dim, spec.head_dim - spec.value_dim, spec.made)


def made_of(
    rows: torch.Tensor, weight: torch.Tensor, q: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Some heads, their queries, keys and values, until all have been there.

    Values end in zeros, or the others do: fused kernels want all of one width.

    Shapes:
        rows: [tokens, rank + rope]. weight: [heads, nope + value, rank]. q: [queries, heads, nope + rope]. With width
        the larger of nope + rope and value: queries [queries, heads of these, width]; keys and values [1, heads of
        these, tokens, width].
    """
    num_heads, columns, rank = weight.shape
    rope = rows.shape[1] - rank
    nope = q.shape[2] - rope
    value = columns - nope
    width = max(q.shape[2], value)
    q = torch.nn.functional.pad(q, (0, width - q.shape[2])) if width > q.shape[2] else q
    step = max(1, MADE_BYTES // (len(rows) * 2 * width * rows.itemsize))
    for first in range(0, num_heads, step):
        part = weight[first : first + step]
        both = rows.new_zeros(2, len(part), len(rows), width)
        made = (rows[:, :rank] @ part.flatten(0, 1).t()).view(len(rows), len(part), columns).transpose(0, 1)
        both[0, ..., :nope] = made[..., :nope]
        both[0, ..., nope : nope + rope] = rows[:, rank:]
        both[1, ..., :value] = made[..., nope:]
        heads = slice(first, first + step)
        yield heads, q[:, heads], both[:1], both[1:]
