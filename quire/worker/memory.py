"""How large the KV cache is: what the model, its largest step and the user leave of the device's memory."""

from __future__ import annotations

from typing import NamedTuple

from quire.config.cache import CacheConfig
from quire.config.resolve import Resolved
from quire.foundation.errors import ConfigError, DoesNotFitError
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

    Raises DoesNotFitError, with the bytes short and the option to change, if one request cannot fit; ConfigError if it
    is the number of blocks asked for that is too small.
    """
    cache = resolved.config.cache
    if pages.whole_prompts:  # a block a seat, and the null block
        return CacheSize(resolved.max_num_seqs + 1, resolved.max_model_len, "")
    groups, longest = pages.groups, resolved.max_model_len
    budget, why, option = _budget(cache, memory)
    # More blocks than all seats can ever fill serve nobody; slots are int32.
    useful = resolved.max_num_seqs * sum(group.num_blocks(longest) for group in groups) + 1
    if cache.enable_prefix_caching:  # copies of states are beside the seats' own
        useful += _COPIES * resolved.max_num_seqs * sum(group.pages for group in groups)
    useful = min(useful, *(MAX_TOKENS // group.block_size for group in groups if not group.pages))
    num_blocks = cache.num_gpu_blocks_override or min(int(budget // pages.page_bytes), useful)
    fits, needed = capacity(groups, num_blocks), sum(group.most_blocks(longest) for group in groups) + 1
    if fits >= longest:
        return CacheSize(num_blocks, longest, "")
    must_fit = resolved.max_model_len_is_explicit or fits < 2
    if cache.num_gpu_blocks_override:
        if must_fit:
            raise ConfigError(
                f"{num_blocks} KV blocks hold {max(fits, 0)} tokens; max_model_len={longest} needs {needed}: raise "
                "num_gpu_blocks_override, or lower max_model_len",
                "num_gpu_blocks_override",
            )
        return CacheSize(num_blocks, fits, f"max_model_len={fits}: num_gpu_blocks_override holds no more")
    wanted = needed * pages.page_bytes
    if must_fit:
        raise DoesNotFitError(
            f"the KV cache may take {_size(budget)} ({why}), which holds {max(fits, 0)} tokens; "
            f"max_model_len={longest} needs {_size(wanted)}, {_size(wanted - budget)} more: lower --max-model-len, "
            f"raise {option}, or free memory",
            "max_model_len",
        )
    note = (
        f"max_model_len={fits}: the model's {longest} tokens would need {_size(wanted)} of KV cache, {_size(budget)} "
        "are there"
    )
    return CacheSize(num_blocks, fits, note)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if abs(num_bytes) >= 0.1 * _GIB else f"{num_bytes / 1024**2:.2f} MiB"


def _budget(cache: CacheConfig, memory: Memory) -> tuple[float, str, str]:
    """Bytes, why so many, and the option that says more."""
    if memory.is_cpu:
        option = "--cpu-kv-cache-memory-bytes"
        if cache.cpu_kv_cache_memory_bytes:
            return cache.cpu_kv_cache_memory_bytes, "cpu_kv_cache_memory_bytes", option
        return memory.free / 4, "a quarter of the free memory", option
    if cache.kv_cache_memory_bytes:
        return cache.kv_cache_memory_bytes, "kv_cache_memory_bytes", "--kv-cache-memory-bytes"
    # Not what was free before the start: what the process keeps of a first engine (code of kernels, the library's
    # workspace) was free then, and is not before a second one, which shall get the same.
    share, left = cache.gpu_memory_utilization, memory.free + memory.weights + min(memory.kept, _SPARE_BYTES)
    why = (
        f"{share:.0%} of the {left / _GIB:.1f} GiB that others leave, less "
        f"{memory.weights / _GIB:.1f} GiB weights and {memory.activations / _GIB:.1f} GiB activations"
    )
    return left * share - memory.weights - memory.activations - _SPARE_BYTES, why, "--gpu-memory-utilization"
