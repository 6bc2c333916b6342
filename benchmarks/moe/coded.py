"""Experts in codes: a layer's products as they are made, and with the experts widened at every step, beside the time
that the codes take at the memory's rate or the products at the matrix units'."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import torch

from benchmarks import chip, workloads
from benchmarks.kernels import microseconds
from quire.kernels.moe import coded_experts
from quire.kernels.moe.inside import USUAL, Gate, Inside
from quire.kernels.moe.routing import Rule, route
from quire.kernels.triton.rehearsal import Rehearsal
from quire.quantization.base import FORMATS
from quire.quantization.grouped import CodedExperts

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
COPY_BYTES_PER_S, MATMUL_FLOPS = chip.at_hand() or chip.H200
PAST_L2 = 256 * 2**20


class Coded:
    """Some layers' experts in the format of "model+format", all experts of a layer alike."""

    def __init__(self, model: str) -> None:
        sparse, quantization = workloads.experts_of(model), workloads.quantization_of(model)
        assert sparse is not None
        assert quantization is not None
        self.model, self.form = model, FORMATS.get(quantization)()
        (self.experts, self.top_k, self.inner), self.hidden = sparse, workloads.config_of(model)["hidden_size"]
        self.rule = Rule(self.experts, self.top_k, renormalize=True)
        shapes = ((2 * self.inner, self.hidden), (self.hidden, self.inner))
        alike = [self.form.pack(torch.randn(n, k, device=DEVICE, dtype=DTYPE) / k**0.5) for n, k in shapes]
        self.expert_bytes = sum(tensor.nbytes for one in alike for tensor in one.values())
        count = min(max(PAST_L2 // (self.expert_bytes * self.experts) + 1, 2), 8)
        self.layers = [self._stacked(alike) for _ in range(count)]
        self.inside = USUAL
        if workloads.config_of(model)["model_type"] == "gpt_oss":
            biases = (torch.randn(self.experts, n, device=DEVICE, dtype=DTYPE) for n, _ in shapes)
            self.inside = Inside(Gate(alpha=1.702, limit=7.0, shift=1.0), *biases)

    def _stacked(self, alike: list[dict[str, torch.Tensor]]) -> CodedExperts:
        repeated = ({name: torch.stack([y] * self.experts) for name, y in one.items()} for one in alike)
        found = self.form.experts(*repeated)
        assert isinstance(found, CodedExperts)
        return found


def lines(setting: Coded, rows: int) -> Iterator[str]:
    s = setting
    x, residual = (torch.randn(rows, s.hidden, device=DEVICE, dtype=DTYPE) for _ in range(2))
    times = max(len(s.layers), 8 if rows <= 64 else 2)
    routes = [route(torch.randn(rows, s.experts, device=DEVICE), s.rule) for _ in range(times)]
    hit = sum(len(one.experts.unique()) for one in routes) / times
    norm = (torch.ones(s.hidden, device=DEVICE, dtype=DTYPE), 1e-6) if routes[0].tiling is None else None
    products = 6 * rows * s.top_k * s.hidden * s.inner
    floor = max(hit * s.expert_bytes / COPY_BYTES_PER_S, products / MATMUL_FLOPS) * 1e6

    def add(number: int) -> None:
        s.layers[number % len(s.layers)].add(x, routes[number], residual, norm, s.inside)

    def measured() -> float:
        rehearsal = Rehearsal()
        with rehearsal:
            add(0)
        rehearsal.wait()
        return microseconds([partial(add, number) for number in range(times)])

    with patch.object(coded_experts, "takes", lambda *_: False):
        widened = measured()
    us = measured()
    yield (f"{s.model}, {rows} rows, {hit:.1f} experts hit: {us:9.2f} us, floor {floor:8.2f} ({floor / us:.1%}); "
           f"widened at every step {widened:9.2f} us")  # fmt: skip
