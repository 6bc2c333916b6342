"""Checkpoints of torch's own form (.bin, .pt): a process that says where in the file each tensor lies.

Such a file is a zip archive of tensors' bytes and a pickle that describes them, and a pickle is a program. It is read
by torch's restricted reader, which builds tensors and plain containers and refuses everything else, in a fork with
limits that writes no file, connects to nothing and starts no program. No tensor is built either: what goes back are
names, types, shapes and places, and the bytes are then read straight from the file, as those of safetensors are.
"""

from __future__ import annotations

import io
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quire.conversion.job import Listing, Place
from quire.conversion.no_network import close_the_network
from quire.foundation.fork_server import ForkServer, Limits

LIMITS = Limits(cpu_seconds=120, wall_seconds=240.0, memory_bytes=4 * 1024**3, forks=1)


def work(body: bytes) -> bytes:
    """In the fork: a path to a Listing's bytes."""
    close_the_network()
    return msgspec.msgpack.encode(listing(body.decode()))


def listing(path: str) -> Listing:
    try:
        with FakeTensorMode():
            state = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
            state = state["state_dict"]
        if not isinstance(state, Mapping):
            return Listing(error=f"holds a {type(state).__name__}, and no tensors by name")
        return Listing({name: _place(name, tensor) for name, tensor in state.items()})
    except Exception as error:  # of a library, for whatever stands in the file
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        found = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0] if lines else "")
        return Listing(error=f"cannot be read: {type(error).__name__}: {found[:300]}")


def _place(name: Any, tensor: Any) -> Place:
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name!r} is no tensor with a name")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is a view of another tensor: save the checkpoint anew")
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if begin is None:
        raise ValueError(f"{name} lies in a file of torch's old form (before 1.6): save the checkpoint anew")
    start = begin + tensor.storage_offset() * tensor.itemsize
    return Place(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start)


def _import_all() -> None:
    """What torch imports at the first file, here and not in each fork, which cannot even make a temporary file."""
    file = io.BytesIO()
    torch.save({"x": torch.zeros(1)}, file)
    file.seek(0)
    with FakeTensorMode():
        torch.load(file, weights_only=True)


if __name__ == "__main__":
    _import_all()
    ForkServer(socket.socket(fileno=int(sys.argv[1])), work, LIMITS).run()
