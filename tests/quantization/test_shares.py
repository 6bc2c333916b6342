"""Ranks' shares of quantized matrices: each is that part of what the whole stands for, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.distributed.topology import Topology
from quire.foundation.errors import ConfigError
from quire.layers.linear import Linear, stacked
from quire.quantization.base import QuantizationMethod
from quire.quantization.select import make_method
from tests.models.test_targets import read
from tests.quantization import test_floats, writers
from tests.quantization.test_floats import fp8, fp8_block, fp8_tensor, mxfp4, tensors
from tests.quantization.test_integers import ct_config, gptq_config
from tests.quantization.writers import awq, gptq, pack_quantized

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
CASES: dict[str, tuple[writers.Writer, dict[str, Any]]] = {
    "gptq": (gptq(4, 32, symmetric=False), gptq_config(4, 32, sym=False)),
    "gptq-3": (gptq(3, 32, symmetric=False), gptq_config(3, 32, sym=False)),
    "gptq-sorted": (gptq(4, 32, symmetric=False, sort=True), gptq_config(4, 32, sym=False, desc_act=True)),
    "gptq-3-sorted": (gptq(3, 32, sort=True), gptq_config(3, 32, desc_act=True)),
    "packed-sorted": (
        pack_quantized(4, 32, symmetric=False, sort=True),
        ct_config(4, 32, symmetric=False, actorder="group"),
    ),
    "gptq-8-whole": (gptq(8, -1), gptq_config(8, -1)),
    "awq": (awq(32), AWQ),
    "packed": (pack_quantized(4, 32, symmetric=False), ct_config(4, 32, symmetric=False)),
    "fp8-tensor": (fp8_tensor(), fp8()),
    "fp8-cut-block": (fp8_block("weight_scale_inv", 48, 32), fp8(weight_block_size=[48, 32])),
    "fp8-block": (fp8_block("weight_scale_inv", 32, 32), fp8(weight_block_size=[32, 32])),
    "mxfp4": (mxfp4, tensors("mxfp4-pack-quantized", test_floats.FLOAT4)),
}


def share(
    role: Any, rank: int, size: int, parts: dict[str, int], columns: int, method: QuantizationMethod, fused: str = ""
) -> Linear:
    """fused: the module that has all parts."""
    stored = stacked(fused, parts) if fused else None
    linear = Linear(columns, sum(parts.values()), bias=False, role=role, parts=parts, stored=stored)
    linear.allocate(method, (fused,) * len(parts) if fused else tuple(parts), Topology(rank, size))
    return linear


def written(writer: writers.Writer, parts: dict[str, int], columns: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """A checkpoint of the modules, and what they stand for."""
    found: dict[str, torch.Tensor] = {}
    dense = []
    for name, rows in parts.items():
        stored, stands_for = writer(torch.randn(rows, columns))
        found |= {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}
        dense.append(stands_for)
    return found, dense


def dense_of(linear: Linear, checkpoint: dict[str, torch.Tensor], folder: Path) -> torch.Tensor:
    wanted = (target for target in linear.targets() if not target.is_optional or target.source in checkpoint)
    targets = [target.cut_to(tuple(checkpoint[target.source].shape)) for target in wanted]
    flat = {target.source: checkpoint[target.source].view(target.shape) for target in targets}
    read(folder, flat, targets)
    return linear.matrix.dense(torch.float32)


@pytest.mark.parametrize(("writer", "config"), CASES.values(), ids=CASES)
def test_shares_make_the_whole(writer: writers.Writer, config: dict[str, Any], tmp_path: Path) -> None:
    method = make_method(config["quant_method"], config)
    parts = {"q": 128, "k": 64, "v": 64}
    checkpoint, dense = written(writer, parts, 96)
    for rank in range(2):
        mine = dense_of(share("rows", rank, 2, parts, 96, method), checkpoint, tmp_path)
        assert torch.allclose(mine, torch.cat([part.chunk(2)[rank] for part in dense]), rtol=1e-6, atol=0)
    checkpoint, (whole,) = written(writer, {"o": 64}, 128)
    shares = [dense_of(share("columns", rank, 2, {"o": 64}, 128, method), checkpoint, tmp_path) for rank in range(2)]
    assert torch.allclose(torch.cat(shares, dim=1), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("role", "columns", "config", "words"),
    [
        ("columns", 96, gptq_config(4, 32), "inputs are stored 32 together and cannot be cut at 48"),
        ("columns", 96, fp8(weight_block_size=[32, 32]), "inputs are stored 32 together"),
    ],
)
def test_groups_are_not_divided(role: str, columns: int, config: dict[str, Any], words: str) -> None:
    linear = share(role, 1, 2, {"m": 64}, columns, make_method(config["quant_method"], config))
    with pytest.raises(ConfigError, match=words):
        list(linear.targets())
