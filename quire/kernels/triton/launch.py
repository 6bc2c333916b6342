"""What every launch asks of the device.

Programmatic dependent launch: a kernel may be scheduled while those before it still run. Each kernel here calls
`gdc_wait` in every program before it touches what another one of the step writes or reads. The wait is for the
predecessor alone, but that one cannot have ended without its own wait: behind it, all before have ended.

Most call `gdc_launch_dependents` first. Then several kernels stand in line, in place and with their weights on the
way. Some call it after their wait, where it was seen to pay: successors in place too early share the processors
unevenly with those who still run, and take their share of memory's rate.

So ahead of the wait a kernel may read weights, the step's own inputs (seats, lengths, tables, positions) and KV of
earlier steps, and only those. What writes them is cut off from their readers by a kernel that is launched without all
this: the embedding. Where its predecessor lets others begin behind its own wait, a kernel may also read what that one
has waited for. One that reads nothing else waits at its end, in one program, that none behind it comes too early.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import triton

logger = logging.getLogger(__name__)

GLUON_TESTED = ("3.6",)


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether `device` supports programmatic dependent launch (compute capability 9.0 on)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def has_gluon_sm90(device: torch.device) -> bool:
    """Whether kernels in Gluon for compute capability 9.0 run, with a Triton they were tested with.

    Gluon is experimental: with every version of Triton its functions may be others, or mean something else.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if not triton.__version__.startswith(GLUON_TESTED):
        logger.info("prompts: the plain kernels; the faster ones need triton %s", " or ".join(GLUON_TESTED))
        return False
    return True


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`; an H200's number where there is none (the interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def shared_bytes(device: torch.device) -> int:
    """Of shared memory that one program may have; an H200's number where there is no GPU (the interpreter)."""
    if device.type != "cuda":
        return 232448
    found: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return found


def cdiv(value: int, unit: int) -> int:
    """How many units hold so much. Triton's own is a function of its compiler, which takes microseconds to call."""
    return -(-value // unit)


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def dot_width(value: int) -> int:
    """Columns of a tile that holds `value` of them and goes through the matrix units, which take no fewer than 16."""
    return max(next_power_of_2(value), 16)
