"""TorchAO's and HQQ's checkpoints, made by the libraries themselves: weights bit for bit, and the model's logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.foundation.errors import ConfigError, WeightsError
from quire.models.base import DecoderStack
from quire.quantization.methods.hqq import HQQ
from tests.models import checkpoints
from tests.models.paged import PagedRows
from tests.quantization import test_models
from tests.quantization.test_models import linears
from tests.quantization.test_shares import dense_of, share, written
from tests.quantization.writers import PLAIN, SIZES

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]


def build(folder: Path) -> DecoderStack:
    return test_models.build(folder, unused=HQQ.unused)


def make(family: str, folder: Path, pack: Callable[[str, torch.Tensor], Packed | None], config: dict[str, Any]) -> Path:
    """Plain and packed checkpoints in folder/dense and folder/packed."""
    sizes = {"num_local_experts": 4} if family == "Mixtral" else {}
    dense = checkpoints.save(checkpoints.make(family, **SIZES, **sizes), folder / "dense")
    state, packed = load_file(dense / "model.safetensors"), {}
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        skipped = tensor.dim() != 2 or any(part in name for part in (*PLAIN, "embed_"))
        made = None if skipped else pack(module, tensor)
        if made is None:
            packed[name] = tensor
            continue
        tensors, state[name] = made
        packed |= {f"{module}.{part}": value.contiguous() for part, value in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, dense / "model.safetensors")
    out = shutil.copytree(dense, folder / "packed")
    save_file(packed, out / "model.safetensors")
    checkpoints.rewrite_config(out, quantization_config=config)
    return out


def check(folder: Path, *, exact: bool = True) -> None:
    """Each matrix is what the library says, and so are the logits."""
    ours, theirs = build(folder / "packed"), build(folder / "dense")
    for path, linear in linears(theirs).items():
        one, other = linears(ours)[path].matrix.dense(torch.float32), linear.matrix.dense(torch.float32)
        assert torch.equal(one, other) if exact else (one - other).abs().max() <= 1e-6, path
    ids = [list(range(30)), list(range(40, 60))]
    for one, other in zip(PagedRows(ours).step([1, 2], ids), PagedRows(theirs).step([1, 2], ids), strict=True):
        assert (one - other).abs().max() <= 1e-4


# -- TorchAO ----------------------------------------------------------------------------------------------------


def torchao_config(config: Any, **more: Any) -> dict[str, Any]:
    from torchao.core.config import config_to_dict

    return {"quant_method": "torchao", "quant_type": {"default": config_to_dict(config)}, **more}


def by_torchao(config: Any) -> Callable[[str, torch.Tensor], Packed]:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    def pack(module: str, weight: torch.Tensor) -> Packed:
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        quantize_(linear, config)
        flat, _ = flatten_tensor_state_dict({f"{module}.weight": linear.weight})
        tensors = {name.removeprefix(f"{module}."): tensor for name, tensor in flat.items()}
        assert tensors.keys() > {"_weight_qdata"}
        return tensors, linear.weight.dequantize().float()

    return pack


def torchao_configs() -> dict[str, Any]:
    q = pytest.importorskip("torchao.quantization")
    return {
        "int8": q.Int8WeightOnlyConfig(),
        "fp8": q.Float8WeightOnlyConfig(),
        "int4 by group": q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(32)),
        "int3 by output": q.IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=q.PerAxis(0)),
        "int6 with zeros": q.IntxWeightOnlyConfig(
            weight_dtype=torch.int6, granularity=q.PerGroup(32), mapping_type=q.quant_primitives.MappingType.ASYMMETRIC
        ),
        "int4 with int8 activations": q.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=q.PerGroup(32)
        ),
    }


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
@pytest.mark.parametrize(
    "name", ["int8", "fp8", "int4 by group", "int3 by output", "int6 with zeros", "int4 with int8 activations"]
)
def test_torchaos_own_checkpoints(name: str, family: str, tmp_path: Path) -> None:
    config = torchao_configs()[name]
    make(family, tmp_path, by_torchao(config), torchao_config(config))
    check(tmp_path)


def test_torchaos_int8_on_both_sides(tmp_path: Path) -> None:
    """Weights are the library's bit for bit; activations are rounded by row."""
    q = pytest.importorskip("torchao.quantization")
    config = q.Int8DynamicActivationInt8WeightConfig()
    make("Llama", tmp_path, by_torchao(config), torchao_config(config))
    ours, theirs = build(tmp_path / "packed"), build(tmp_path / "dense")
    for path, linear in linears(theirs).items():
        assert torch.equal(linears(ours)[path].matrix.dense(torch.float32), linear.matrix.dense(torch.float32))
    assert type(linears(ours)["layers.0.mlp.down_proj"].matrix).__name__ == "Int8RowsMatrix"


def int4_plain(_: str, weight: torch.Tensor) -> Packed:
    """After the format's definition: q from -8 to 7, `q * scale + zero`, groups first; its own kernels need a GPU."""
    groups = weight.view(len(weight), -1, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    q = ((groups - low) / scale).round().clamp(0, 15) - 8
    zero = low + 8 * scale
    codes = q.to(torch.int8).flatten(1)
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    tensors = {"_weight_qdata": packed, "_weight_scale": scale[..., 0].t(), "_weight_zero_point": zero[..., 0].t()}
    return tensors, (q * scale + zero).flatten(1)


def test_torchaos_int4_two_a_byte(tmp_path: Path) -> None:
    """Within a rounding: a zero is added there, and here taken from the codes."""
    kind = {
        "_type": "Int4WeightOnlyConfig",
        "_version": 2,
        "_data": {"group_size": 32, "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"}},
    }
    make("Llama", tmp_path, int4_plain, {"quant_method": "torchao", "quant_type": {"default": kind}})
    check(tmp_path, exact=False)


def test_torchaos_configs_by_module(tmp_path: Path) -> None:
    q = pytest.importorskip("torchao.quantization")
    eight, four = q.Int8WeightOnlyConfig(), torchao_configs()["int4 by group"]
    rules = {"re:.*mlp.*": four, "model.layers.1.self_attn.o_proj": None, "_default": eight}

    def pack(module: str, weight: torch.Tensor) -> Packed | None:
        rule = rules.get(module, four if "mlp" in module else eight)
        return None if rule is None else by_torchao(rule)(module, weight)

    make("Llama", tmp_path, pack, torchao_config(q.FqnToConfig(rules)))
    check(tmp_path)


def test_modules_that_torchaos_config_leaves_out_and_files_do_not(tmp_path: Path) -> None:
    config = torchao_configs()["int4 by group"]
    left_out = {"modules_to_not_convert": ["mlp.down_proj", "layers.1"]}
    make("Llama", tmp_path, by_torchao(config), torchao_config(config, **left_out))
    check(tmp_path)


@pytest.mark.parametrize(
    ("quant_type", "message"),
    [
        ("int8_weight_only", "quant_type must be an object with a default"),
        (
            {"default": {"_type": "GemliteUIntXWeightOnlyConfig", "_data": {}}},
            "GemliteUIntXWeightOnlyConfig is not supported",
        ),
        (
            {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"int4_packing_format": "tile_packed_to_4d"}}},
            "int4_packing_format=tile_packed_to_4d is of one device",
        ),
        ({"default": {"_type": "Int8WeightOnlyConfig", "_data": {"odd": 3}}}, "odd=3 are not supported"),
        (
            {
                "default": {
                    "_type": "Int8WeightOnlyConfig",
                    "_data": {"granularity": {"_type": "PerTensor", "_data": {}}},
                }
            },
            "granularity PerTensor is not supported",
        ),
    ],
    ids=lambda _: "",
)
def test_what_torchao_can_and_we_cannot_is_refused_by_name(quant_type: Any, message: str, tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("Llama", **SIZES), tmp_path)
    checkpoints.rewrite_config(folder, quantization_config={"quant_method": "torchao", "quant_type": quant_type})
    with pytest.raises(ConfigError, match=message):
        build(folder)


# -- HQQ --------------------------------------------------------------------------------------------------------


def hqq_config(bits: int, group: int | None, axis: int) -> dict[str, Any]:
    quantize = pytest.importorskip("hqq.core.quantize")
    config: dict[str, Any] = quantize.BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
    return config


def by_hqq(config: dict[str, Any]) -> Callable[[str, torch.Tensor], Packed]:
    quantize = pytest.importorskip("hqq.core.quantize")

    def pack(_: str, weight: torch.Tensor) -> Packed:
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        made = quantize.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
        return {name: t for name, t in made.state_dict().items() if t is not None}, made.dequantize().float()

    return pack


CASES = [(4, 64, 1), (4, 32, 1), (2, 32, 1), (3, 32, 1), (8, 64, 1), (1, 32, 1), (4, None, 1), (4, 64, 0), (3, 32, 0)]


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hqqs_own_checkpoints(case: tuple[int, int | None, int], family: str, tmp_path: Path) -> None:
    if case[1] == 64:  # of 96 inputs there are no such groups
        case = (case[0], 32, case[2])
    config = hqq_config(*case)
    make(family, tmp_path, by_hqq(config), {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]})
    check(tmp_path, exact=case[0] != 8)


def test_hqqs_modules_of_one_matrix_that_are_unlike(tmp_path: Path) -> None:
    """By name, as `dynamic_config` writes it: q and k of other bits, v plain."""
    rules = {"self_attn.q_proj": hqq_config(4, 32, 1), "self_attn.k_proj": hqq_config(8, 32, 1)}

    def pack(module: str, weight: torch.Tensor) -> Packed | None:
        rule = next((rule for name, rule in rules.items() if module.endswith(name)), None)
        return None if rule is None else by_hqq(rule)(module, weight)

    make("Llama", tmp_path, pack, {"quant_method": "hqq", "quant_config": rules})
    check(tmp_path, exact=False)


@pytest.mark.parametrize("family", ["Phi3", "GPTNeoX"])
@pytest.mark.parametrize("case", [(4, 32, 1), (3, None, 1), (4, 32, 0)], ids=str)
def test_hqqs_modules_that_are_several_here(case: tuple[int, int | None, int], family: str, tmp_path: Path) -> None:
    """One after the other, or by heads."""
    config = hqq_config(*case)
    make(family, tmp_path, by_hqq(config), {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]})
    check(tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_keep_their_share_of_hqqs_modules(case: tuple[int, int | None, int], tmp_path: Path) -> None:
    config = hqq_config(*case)
    method = HQQ.of_checkpoint({"quant_method": "hqq", "quant_config": config})
    parts = {"q": 128, "k": 64, "v": 64}
    checkpoint, dense = written(partial(by_hqq(config), ""), parts, 128)
    for rank in range(2):
        mine = dense_of(share("rows", rank, 2, parts, 128, method), checkpoint, tmp_path)
        assert torch.allclose(mine, torch.cat([part.chunk(2)[rank] for part in dense]), rtol=1e-6, atol=1e-6)
    checkpoint, (whole,) = written(partial(by_hqq(config), ""), {"qkv": 256}, 128)
    for rank in range(2):
        mine = dense_of(share("rows", rank, 2, parts, 128, method, fused="qkv"), checkpoint, tmp_path)
        wanted = torch.cat([part.chunk(2)[rank] for part in whole.split([*parts.values()])])
        assert torch.allclose(mine, wanted, rtol=1e-6, atol=1e-6)
    checkpoint, (whole,) = written(partial(by_hqq(config), ""), {"o": 64}, 128)
    shares = [dense_of(share("columns", rank, 2, {"o": 64}, 128, method), checkpoint, tmp_path) for rank in range(2)]
    assert torch.allclose(torch.cat(shares, dim=1), whole, rtol=1e-6, atol=1e-6)


def test_groups_of_hqq_are_not_divided() -> None:
    method = HQQ.of_checkpoint({"quant_method": "hqq", "quant_config": hqq_config(4, 64, 1)})
    for rank, place in ((0, 96), (1, 96)):
        with pytest.raises(ConfigError, match=f"inputs of o are stored 64 together and cannot be cut at {place}"):
            share("columns", rank, 2, {"o": 64}, 192, method)


def test_hqqs_tensors_that_say_otherwise_are_damaged(tmp_path: Path) -> None:
    config = hqq_config(4, 32, 1)
    folder = make("Llama", tmp_path, by_hqq(config), {"quant_method": "hqq", "quant_config": config})
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.down_proj.nbits"] = torch.tensor(2)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"down_proj is of 2 bits, axis 1, groups of 32.*the config says 4, 1, 32"):
        build(folder)


@pytest.mark.parametrize(
    ("quant_config", "message"),
    [
        (
            {"weight_quant_params": {"nbits": 5, "group_size": 64, "axis": 1}},
            "nbits must be one of 1, 2, 3, 4, 8, got 5",
        ),
        (
            {"weight_quant_params": {"nbits": 4, "group_size": 7, "axis": 1}},
            "group_size must be a multiple of 8, got 7",
        ),
        ({"weight_quant_params": {"nbits": 4, "axis": 2}}, "axis must be one of 0, 1, got 2"),
        (
            {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 1}, "scale_quant_params": {"nbits": 8}},
            "scale_quant_params=.* are not supported",
        ),
    ],
    ids=lambda _: "",
)
def test_what_hqq_can_and_we_cannot_is_refused_by_name(quant_config: Any, message: str, tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("Llama", **SIZES), tmp_path)
    checkpoints.rewrite_config(folder, quantization_config={"quant_method": "hqq", "quant_config": quant_config})
    with pytest.raises(ConfigError, match=message):
        build(folder)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "hqq"
