"""Checkpoints of small floats, and of 8-bit integers with rounded activations: fp8 of every shape of scale, ModelOpt,
compressed-tensors. Expected numbers are computed here, from what the formats say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.gemm import int8_linear
from tests.models.paged import PagedRows
from tests.quantization import writers
from tests.quantization.test_integers import IDS, assert_same_answers, load
from tests.quantization.writers import Written, make

E4M3 = torch.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp8_tensor(shape: tuple[int, ...] = ()) -> writers.Writer:
    def write(weight: torch.Tensor) -> Written:
        scale = weight.abs().max() / 448
        narrow = (weight / scale).to(E4M3)
        tensors = {"weight": narrow, "weight_scale": scale.view(shape), "input_scale": torch.tensor(0.1).view(shape)}
        return tensors, narrow.float() * scale

    return write


def fp8_channel(*more: int) -> writers.Writer:
    def write(weight: torch.Tensor) -> Written:
        scale = weight.abs().amax(1, keepdim=True) / 448
        narrow = (weight / scale).to(E4M3)
        return {"weight": narrow, "weight_scale": scale.view(-1, *more)}, narrow.float() * scale

    return write


def fp8_block(name: str, rows: int, columns: int, *, spread: bool = False) -> writers.Writer:
    def write(weight: torch.Tensor) -> Written:
        n, k = weight.shape
        scale = torch.empty(-(-n // rows), -(-k // columns))
        narrow, dense = torch.empty(n, k, dtype=E4M3), torch.empty(n, k)
        for i in range(len(scale)):
            for j in range(scale.shape[1]):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale[i, j] = weight[part].abs().max() / 448
                narrow[part] = (weight[part] / scale[i, j]).to(E4M3)
                dense[part] = narrow[part].float() * scale[i, j]
        return {"weight": narrow, name: scale[:, None, :, None] if spread else scale}, dense

    return write


def mxfp8(weight: torch.Tensor) -> Written:
    blocks = weight.view(len(weight), -1, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 8
    narrow = (blocks / 2 ** exponent[..., None]).clamp(-448, 448).to(E4M3)
    dense = narrow.float() * 2 ** exponent[..., None]
    return {"weight": narrow.view_as(weight), "weight_scale": (exponent + 127).to(torch.uint8)}, dense.view_as(weight)


def e2m1(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest codes, and their values."""
    index = np.abs(np.abs(values)[..., None] - E2M1).argmin(-1)
    negative = values < 0
    return index + 8 * negative, np.where(negative, -E2M1[index], E2M1[index])


def low_first(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))


def mxfp4(weight: torch.Tensor) -> Written:
    w = weight.numpy().astype(np.float64).reshape(len(weight), -1, 32)
    exponent = np.floor(np.log2(np.abs(w).max(-1))) - 2
    codes, values = e2m1(w / 2 ** exponent[..., None])
    dense = (values * 2 ** exponent[..., None]).reshape(weight.shape).astype(np.float32)
    scale = torch.from_numpy((exponent + 127).astype(np.uint8))
    return {"weight_packed": low_first(codes.reshape(weight.shape)), "weight_scale": scale}, torch.from_numpy(dense)


def nvfp4(names: tuple[str, str, str], *, inverse: bool) -> writers.Writer:
    def write(weight: torch.Tensor) -> Written:
        blocks = weight.view(len(weight), -1, 16)
        factor = (weight.abs().max() / (6 * 448)).float()
        scale = (blocks.abs().amax(-1) / 6 / factor).to(E4M3)
        step = (scale.float() * factor)[..., None].numpy().astype(np.float64)
        codes, values = e2m1(blocks.numpy() / np.maximum(step, 1e-30))
        dense = torch.from_numpy((values * step).reshape(weight.shape).astype(np.float32))
        kept = 1 / factor if inverse else factor
        shape = (1,) if inverse else ()
        packed = low_first(codes.reshape(weight.shape))
        more = {"input_global_scale" if inverse else "input_scale": torch.tensor(3.0).view(shape)}
        return dict(zip(names, (packed, scale, kept.view(shape)), strict=True)) | more, dense

    return write


def fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **more}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head", "*gate"], **more}


def tensors(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    """compressed-tensors with one scheme."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*gate$"],
    }  # fmt: skip


FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FLOAT4: dict[str, Any] = {**FLOAT8, "num_bits": 4, "strategy": "group", "group_size": 32}
TENSOR: dict[str, Any] = {**FLOAT8, "strategy": "tensor"}
TOKENS: dict[str, Any] = {**FLOAT8, "strategy": "token", "dynamic": True}
_OPT, _CT = ("weight", "weight_scale", "weight_scale_2"), ("weight_packed", "weight_scale", "weight_global_scale")
CASES: dict[str, tuple[str, writers.Writer, dict[str, Any]]] = {
    "fp8-tensor-static": ("Llama", fp8_tensor(), fp8(activation_scheme="static")),
    "fp8-block": ("Qwen3", fp8_block("weight_scale_inv", 128, 128), fp8(weight_block_size=[128, 128])),
    "fp8-small-blocks": ("Llama", fp8_block("weight_scale_inv", 24, 32), fp8(weight_block_size=[24, 32])),
    "fbgemm": (
        "Llama",
        fp8_channel(1),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
    "fp8-mixtral": ("Mixtral", fp8_block("weight_scale_inv", 32, 32), fp8(weight_block_size=[32, 32])),
    "modelopt-fp8": ("Llama", fp8_tensor(), modelopt("FP8", kv_cache_quant_algo="FP8")),
    "modelopt-channel": ("Qwen3", fp8_channel(), modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
    "modelopt-block": ("Llama", fp8_block("weight_scale", 128, 128, spread=True), modelopt("FP8_PB_WO")),
    "modelopt-mxfp8": ("Llama", mxfp8, modelopt("MXFP8", group_size=32)),
    "modelopt-nvfp4": ("Llama", nvfp4(_OPT, inverse=False), modelopt("NVFP4", group_size=16)),
    "modelopt-mixtral": ("Mixtral", nvfp4(_OPT, inverse=False), modelopt("NVFP4", group_size=16)),
    "ct-channel": ("Llama", fp8_channel(1), tensors("float-quantized", {**FLOAT8, "strategy": "channel"}, TOKENS)),
    "ct-tensor": (
        "Qwen3", fp8_tensor((1,)), tensors("float-quantized", TENSOR, TENSOR),
    ),
    "ct-block": (
        "Llama",
        fp8_block("weight_scale", 128, 128),
        tensors("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [128, 128]}, TOKENS),
    ),
    "ct-nvfp4": (
        "Qwen3",
        nvfp4(_CT, inverse=True),
        tensors("nvfp4-pack-quantized", {**FLOAT8, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}),
    ),
    "ct-mxfp4": (
        "Llama", mxfp4, tensors("mxfp4-pack-quantized", FLOAT4),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "writer", "config"), CASES.values(), ids=CASES)
def test_a_checkpoint_gives_the_answers_of_what_it_stands_for(
    family: str, writer: writers.Writer, config: dict[str, Any], tmp_path: Path
) -> None:
    assert_same_answers(make(tmp_path, family, lambda _: writer, config))


# -- 8-bit integers on both sides -------------------------------------------------------------------------------


def int8(input_scale: float | None = None, zero: int | None = None) -> writers.Writer:
    def write(weight: torch.Tensor) -> Written:
        scale = weight.abs().amax(1, keepdim=True) / 127
        narrow = (weight / scale).round().clamp(-127, 127).to(torch.int8)
        found = {"weight": narrow, "weight_scale": scale}
        if input_scale is not None:
            found["input_scale"] = torch.tensor([input_scale])
        if zero is not None:
            found["input_zero_point"] = torch.tensor([zero], dtype=torch.int8)
        return found, narrow.float() * scale

    return write


class RoundedLinear(torch.nn.Linear):
    """As torch has it, with activations that are rounded first."""

    rounding: tuple[float | None, int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, zero = self.rounding
        if scale is None:
            steps = x.abs().amax(-1, keepdim=True) / 127
            return super().forward((x / steps).round().clamp(-127, 127) * steps)
        q = ((x / scale).round() + zero).clamp(-128, 127)
        return super().forward((q - zero) * scale)


INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FIXED: dict[str, Any] = {**INT8, "strategy": "tensor"}
DYNAMIC: dict[str, Any] = {**INT8, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("rounding", "activations"),
    [((None, 0), DYNAMIC), ((0.05, 0), FIXED), ((0.06, 11), {**FIXED, "symmetric": False})],
    ids=["dynamic", "fixed", "fixed-zero"],
)
def test_activations_are_rounded_as_the_checkpoint_says(
    rounding: tuple[float | None, int], activations: dict[str, Any], tmp_path: Path
) -> None:
    writer = int8(rounding[0], rounding[1] if "zero" in str(activations) or rounding[1] else None)
    folder = make(tmp_path, "Llama", lambda _: writer, tensors("int-quantized", INT8, activations))
    theirs = writers.reference(tmp_path)
    for module in list(theirs.model.layers.modules()):
        if isinstance(module, torch.nn.Linear):
            module.__class__ = RoundedLinear
            module.rounding = rounding
    (ours,) = PagedRows(load(folder)).step([1], [IDS[0]])
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS[0]])).logits[0]
    error = (ours.log_softmax(-1) - expected.log_softmax(-1)).abs()
    # A number between two integers may fall to either side: of thousands, hardly one.
    assert error.median() <= 1e-4
    assert error.max() <= 0.05


def test_weights_of_8_bit_integers_alone(tmp_path: Path) -> None:
    assert_same_answers(make(tmp_path, "Llama", lambda _: int8(), tensors("int-quantized", INT8)))


@pytest.mark.parametrize("zero", [None, -7])
def test_int8_products_are_exact(zero: int | None) -> None:
    values, scale = torch.randint(-127, 128, (24, 40), dtype=torch.int8), torch.rand(24) / 100
    fixed = None if zero is None else torch.tensor([0.03])
    offset = None if zero is None else torch.tensor([float(zero)])
    weight = int8_linear.Int8Weight(values, scale, fixed, offset, values.sum(1, dtype=torch.float32))
    x, bias = torch.randn(5, 40), torch.randn(24)
    q, step = int8_linear.rounded(x, weight)
    expected = (q.double() - (zero or 0)) * step @ (values.double() * scale.double()[:, None]).T + bias
    assert torch.allclose(int8_linear.product(x, weight, bias).double(), expected, rtol=1e-5, atol=1e-6)
    assert int8_linear.product(x[:0], weight, bias).shape == (0, 24)
