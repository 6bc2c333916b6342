"""How long each layer of a model takes, and how long it would at best: its bytes at the device's bandwidth, or its
products at the device's arithmetic."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quire.types.kv import KVGroupSpec

COPY_BYTES = 128 * 2**20
PRODUCT = 2048  # rows and columns of the matrices that measure arithmetic
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Device:
    """What a device does at best, as measured on it."""

    bytes_a_second: float
    products_a_second: float  # multiplications with their additions, twice as many operations

    def floor(self, num_bytes: float, products: float) -> float:
        """Seconds."""
        return max(num_bytes / self.bytes_a_second, products / self.products_a_second)


def measure_device(device: torch.device, dtype: torch.dtype) -> Device:
    """The best of a few copies, and of a few products of large matrices, in a second or two."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    left = torch.randn(PRODUCT, PRODUCT, device=device).to(dtype)
    copy = _best(lambda: target.copy_(source), device)
    product = _best(lambda: left @ left, device)
    return Device(2 * COPY_BYTES / copy, PRODUCT**3 / product)


def _best(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(6):
        clock = Clock(device)
        began = clock.now()
        work()
        ended = clock.now()
        times.append(clock.seconds(began, ended))
    return min(times)


class Clock:
    """Marks of time on the device itself."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        if not self._is_cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000


@dataclass
class Layer:
    """All layers of one kind in all steps of so many tokens."""

    name: str
    tokens: int
    calls: int = 0
    seconds: float = 0.0  # its own: what it calls that is a layer left out
    floor: float = 0.0


@dataclass
class _Call:
    name: str
    tokens: int
    began: Any
    ended: Any = None
    inner: list[_Call] = field(default_factory=list)
    activations: int = 0  # bytes in and out


class ModuleTimes:
    """Hooks on the layers of `model`, from `open` to `close`. Only what is called as a layer is seen: where a kernel
    does the work of several, they are one line."""

    def __init__(self, model: nn.Module, groups: Sequence[KVGroupSpec], device: torch.device) -> None:
        self._model, self._clock = model, Clock(device)
        self._groups = groups
        self._hooks: list[Any] = []
        self._open: list[_Call] = []
        self._roots: list[_Call] = []
        self.contexts: dict[int, int] = {}  # tokens of a step → tokens of context that its rows read, in all

    def open(self) -> None:
        for name, module in self._model.named_modules():
            if name:
                self._hooks.append(module.register_forward_pre_hook(self._beginning(name)))
                self._hooks.append(module.register_forward_hook(self._end))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _beginning(self, name: str) -> Any:
        def begin(_module: nn.Module, given: tuple[Any, ...]) -> None:
            tensors = [one for one in given if isinstance(one, torch.Tensor)]
            tokens = tensors[0].shape[0] if tensors and tensors[0].ndim else 0
            call = _Call(name, tokens, self._clock.now(), activations=sum(map(_bytes, tensors)))
            (self._open[-1].inner if self._open else self._roots).append(call)
            self._open.append(call)

        return begin

    def _end(self, _module: nn.Module, _given: Any, result: Any) -> None:
        call = self._open.pop()
        call.ended = self._clock.now()
        if isinstance(result, torch.Tensor):
            call.activations += _bytes(result)

    @property
    def smallest_stack(self) -> int:
        """Layers of the kind that there are fewest of, of those called: each is called once a step."""
        names = {NUMBER.sub("*", name): set[str]() for name in self._called()}
        for name in self._called():
            names[NUMBER.sub("*", name)].add(name)
        return math.gcd(*map(len, names.values())) or 1

    def layers(self, device: Device) -> list[Layer]:
        """By kind and by tokens of a step, the longest first."""
        weights = self._own_weights()
        found: dict[tuple[str, int], Layer] = {}
        pending = list(self._roots)
        for call in pending:  # which grows meanwhile
            pending += call.inner
            kind = NUMBER.sub("*", call.name)
            layer = found.setdefault((kind, call.tokens), Layer(kind, call.tokens))
            layer.calls += 1
            inner = sum(self._clock.seconds(one.began, one.ended) for one in call.inner)
            layer.seconds += self._clock.seconds(call.began, call.ended) - inner
            num_bytes, count = weights[call.name]
            if count or not call.inner:  # else its layers do the work
                if kind.endswith(("attn", "attention")):
                    num_bytes += self._kv_bytes(call.tokens)
                looked_up = isinstance(self._model.get_submodule(call.name), nn.Embedding) or "embed" in kind
                products = 0 if looked_up else count * call.tokens
                layer.floor += device.floor((0 if looked_up else num_bytes) + call.activations, products)
        return sorted(found.values(), key=lambda layer: -layer.seconds)

    def _called(self) -> set[str]:
        pending = list(self._roots)
        for call in pending:  # which grows meanwhile
            pending += call.inner
        return {call.name for call in pending}

    def _own_weights(self) -> dict[str, tuple[int, int]]:
        """Bytes and numbers that a layer reads, those of layers within it that are called left out."""
        called = self._called()
        found: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for name in called:
            found[name] = (0, 0)
        for path, weight in self._model.named_parameters():
            owner = path.rpartition(".")[0]
            while owner and owner not in called:
                owner = owner.rpartition(".")[0]
            if owner:
                num_bytes, count = found[owner]
                found[owner] = num_bytes + _bytes(weight), count + (weight.numel() if weight.ndim > 1 else 0)
        return dict(found)

    def _kv_bytes(self, tokens: int) -> int:
        """What one layer that sees all reads and writes of the cache in a step."""
        group = next((one for one in self._groups if one.keeps_all), None)
        if group is None:
            return 0
        row = group.planes * group.num_kv_heads * group.head_dim * group.dtype_bytes
        return row * (self.contexts.get(tokens, 0) + tokens)


PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0}  # place of the first matrix
# That read all of what they are given.
READERS = (
    "add add_ mul mul_ sub div silu gelu sigmoid pow mean sum rsqrt copy_ cat exp softmax _softmax cumsum argmax sort "
    "max _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"
)


def op_floor(name: str, shapes: Sequence[Sequence[int]], size: int, device: Device) -> float:
    """Seconds of one operation of torch; 0: unknown. size: bytes of a number, if it is one of the model's.

    Of what is no product: what it reads, as what it writes is not recorded.
    """
    known = [shape for shape in shapes if shape and all(isinstance(one, int) for one in shape)]
    if not known:
        return 0.0
    if name in PRODUCTS:
        *batch, rows, inner = shapes[PRODUCTS[name]]
        columns = shapes[PRODUCTS[name] + 1][-1]
        count = math.prod(batch)
        num_bytes = count * (rows * inner + inner * columns + rows * columns) * size
        return device.floor(num_bytes, count * rows * inner * columns)
    return device.floor(sum(map(math.prod, known)) * size, 0) if name.removeprefix("aten::") in READERS.split() else 0.0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
