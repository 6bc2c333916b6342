"""How large the KV cache is: what the model, its largest step and the user leave of the device's memory."""

from __future__ import annotations

from typing import NamedTuple

from quire.config.cache import CacheConfig
from quire.config.resolve import Resolved
from quire.foundation.errors import DoesNotFitError
from quire.types.kv import MAX_TOKENS, capacity
from quire.worker.pages import Pages

_GIB = 1024**3
_SPARE_BYTES = 3 * _GIB // 8  # for what graphs and late kernels take, which no measurement before them can see
_COPIES = 4  # of states, a seat, that the prefix cache has room for if there is so much


class Memory(NamedTuple):
    """Bytes on the device."""

    is_cpu: bool
    free: int  # once the weights are there
    weights: int
    activations: int  # of the largest step
    kept: int = 0  # that the driver keeps of earlier engines' graphs and kernels: paid for, and not free


class CacheSize(NamedTuple):
    num_blocks: int  # pages, the null block included
    max_model_len: int  # tokens of context that the blocks can hold
    note: str  # what was lowered, for the log

    def at_most(self, num_blocks: int, max_model_len: int) -> CacheSize:
        """The size that all ranks can hold."""
        if max_model_len >= self.max_model_len:
            return self._replace(num_blocks=num_blocks)
        note = f"max_model_len={max_model_len}: another rank cannot hold more"
        return CacheSize(num_blocks, max_model_len, note)


def size_cache(resolved: Resolved, pages: Pages, memory: Memory) -> CacheSize:
    """Pages of the KV cache and the context length it can hold.

    Raises DoesNotFitError, with the bytes short and the option to change, if one request cannot fit.
    """
    cache = resolved.config.cache
    if pages.whole_prompts:  # a block a seat, and the null block
        return CacheSize(resolved.max_num_seqs + 1, resolved.max_model_len, "")
    groups, longest = pages.groups, resolved.max_model_len
    budget, why = _budget(cache, memory)
    # More blocks than all seats can ever fill serve nobody; slots are int32.
    useful = resolved.max_num_seqs * sum(group.num_blocks(longest) for group in groups) + 1
    if cache.enable_prefix_caching:  # copies of states are beside the seats' own
        useful += _COPIES * resolved.max_num_seqs * sum(group.pages for group in groups)
    useful = min(useful, *(MAX_TOKENS // group.block_size for group in groups if not group.pages))
    num_blocks = cache.num_gpu_blocks_override or min(int(budget // pages.page_bytes), useful)
    fits = capacity(groups, num_blocks)
    if fits >= longest:
        return CacheSize(num_blocks, longest, "")
    needed = (sum(group.most_blocks(longest) for group in groups) + 1) * pages.page_bytes
    if resolved.max_model_len_is_explicit or fits < 2:
        raise DoesNotFitError(
            f"the KV cache may take {budget / _GIB:.2f} GiB ({why}), which holds {max(fits, 0)} tokens; "
            f"max_model_len={resolved.max_model_len} needs {needed / _GIB:.2f} GiB, "
            f"{(needed - budget) / _GIB:.2f} GiB more: lower --max-model-len, raise "
            f"{'--cpu-kv-cache-memory-bytes' if memory.is_cpu else '--gpu-memory-utilization'}, or free memory",
            "max_model_len",
        )
    note = (
        f"max_model_len={fits}: the model's {resolved.max_model_len} tokens would need {needed / _GIB:.2f} GiB of KV "
        f"cache, {budget / _GIB:.2f} GiB are there"
    )
    return CacheSize(num_blocks, fits, note)


def _budget(cache: CacheConfig, memory: Memory) -> tuple[float, str]:
    """Bytes, and why so many."""
    if memory.is_cpu:
        if cache.cpu_kv_cache_memory_bytes:
            return cache.cpu_kv_cache_memory_bytes, "cpu_kv_cache_memory_bytes"
        return memory.free / 4, "a quarter of the free memory"
    if cache.kv_cache_memory_bytes:
        return cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    # Not what was free before the start: what the process keeps of a first engine (code of kernels, the library's
    # workspace) was free then, and is not before a second one, which shall get the same.
    share, left = cache.gpu_memory_utilization, memory.free + memory.weights + min(memory.kept, _SPARE_BYTES)
    return left * share - memory.weights - memory.activations - _SPARE_BYTES, (
        f"{share:.0%} of the {left / _GIB:.1f} GiB that others leave, less "
        f"{memory.weights / _GIB:.1f} GiB weights and {memory.activations / _GIB:.1f} GiB activations"
    )
