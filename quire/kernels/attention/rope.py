"""Between the qkv projection and attention: split, per-head norm, rotary embedding, write to the paged cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.kernels.dispatch import on_cpu, on_triton
from quire.kernels.elementwise import cpu as cpu_elementwise
from quire.kernels.elementwise.norm import rms_norm_reference
from quire.kernels.masked import only
from quire.kernels.summands import Summands


class QkvTarget(NamedTuple):
    """What becomes of q, k and v: arguments of `qk_norm_rope_write`, in its order."""

    cos_sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6
    interleaved: bool = False
    norm_last: bool = False

    def of(self, tokens: slice) -> QkvTarget:
        return self._replace(positions=self.positions[tokens], slots=self.slots[tokens])


def qk_norm_rope_write(
    qkv: torch.Tensor | Summands,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    norm_last: bool = False,
) -> torch.Tensor:
    """Returns rotated q [tokens, num_heads, head_dim]; k and v go to their slots in the cache.

    qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim], or summands of it that are all there; cos_sin float32
    [max_position, rotary_dim], first half cos, second half sin; positions, slots int32 [tokens] with slot = block *
    block_size + offset, or -1 for a padding token, which is written nowhere; caches [num_blocks, num_kv_heads,
    block_size, head_dim], last two dims contiguous.
    q_weight and k_weight [head_dim] turn on the per-head RMS norm: give both or neither; norm_last: it comes behind the
    rotation. Rotation pairs column i with i + rotary_dim / 2 (Su et al., 2021, in the half-split form of GPT-NeoX), or,
    interleaved, 2i with 2i + 1; columns ≥ rotary_dim pass through.
    The caches may be of an 8-bit float type; values beyond its range become its largest.
    positions and slots must not be written by the kernel launched just before: they are read ahead of its end.
    """
    arguments = (cos_sin, positions, slots, k_cache, v_cache, num_heads, num_kv_heads, head_dim)
    after = (q_weight, k_weight, eps, interleaved, norm_last)
    if on_triton(positions):
        from quire.kernels.attention.triton import rope

        return rope.qk_norm_rope_write(qkv.parts if isinstance(qkv, Summands) else qkv, *arguments, *after)
    if isinstance(qkv, Summands):
        qkv = qkv.sum()
    if on_cpu(qkv) and k_cache.itemsize > 1:
        return cpu_elementwise.qk_norm_rope_write(qkv, *arguments, *after)
    return qk_norm_rope_write_reference(qkv, *arguments, *after)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """The rotation alone: x [tokens, heads, head_dim], float32 inside."""
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(x.float(), cos, sin, interleaved).to(x.dtype)


def qk_norm_rope_write_reference(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    norm_last: bool = False,
) -> torch.Tensor:
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k = q.float(), k.float()  # float32 from here to the end: the norm's result is not rounded on its way
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
    if norm_last:
        q, k = _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm_reference(q, q_weight, eps), rms_norm_reference(k, k_weight, eps)
    if not norm_last:
        q, k = _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)
    write_slots(k_cache, slots, k)
    write_slots(v_cache, slots, v)
    rotated: torch.Tensor = q.to(qkv.dtype)
    return rotated


def write_slots(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """values [tokens, kv_heads, head_dim] to their slots, but for those that have none."""
    values, size = _narrowed(values, cache.dtype), cache.shape[2]
    if cache.itemsize == 1:  # which few operations know
        values, cache = values.view(torch.uint8), cache.view(torch.uint8)
    index, values = only(slots >= 0, slots.long(), values, lambda at: cache[at // size, :, at % size])
    cache[index // size, :, index % size] = values


def _narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the hardware converts: what an 8-bit type cannot hold becomes its largest value."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x.float().clamp(-largest, largest)
    return x.to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = cos.shape[-1]
    turned, rest = x.split([2 * half, x.shape[-1] - 2 * half], dim=-1)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([pairs.flatten(-2), rest], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
