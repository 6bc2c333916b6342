"""Checkpoints of bitsandbytes: tables of 16 values, with plain or quantized scales, and integers of 8 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.foundation.errors import ConfigError, WeightsError
from quire.quantization.methods.bitsandbytes import BitsAndBytes
from tests.quantization import writers
from tests.quantization.test_integers import assert_same_answers, load
from tests.quantization.test_shares import dense_of, share, written
from tests.quantization.writers import Written, make

NF4 = np.array([
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
    0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
])  # fmt: skip
_HALF = np.array([0, 0.00520833, 0.6666667, 1, 0.3333333, 0.5, 0.1666667, 0.25])
TABLES = {"nf4": NF4, "fp4": np.concatenate([_HALF, -_HALF])}


def four_bits(kind: str, *, nested: bool) -> writers.Writer:
    def write(weight: torch.Tensor) -> Written:
        blocks = weight.numpy().astype(np.float64).reshape(-1, 64)
        scale = np.abs(blocks).max(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        found: dict[str, np.ndarray] = {"weight.absmax": scale.astype(np.float32)}
        if nested:
            offset, values = float(np.float32(scale.mean())), np.linspace(-1, 1, 256).astype(np.float32)
            padded = np.pad(scale - offset, (0, -len(scale) % 256)).reshape(-1, 256)
            factor = np.abs(padded).max(1).astype(np.float32)
            codes = np.abs((padded / factor[:, None])[..., None] - values).argmin(-1)
            scale = (values[codes] * factor[:, None]).reshape(-1)[: len(scale)] + np.float32(offset)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            found = {
                "weight.absmax": codes.reshape(-1)[: len(scale)].astype(np.uint8), "weight.nested_absmax": factor,
                "weight.nested_quant_map": values,
            }  # fmt: skip
        table = TABLES[kind]
        codes = np.abs((blocks / scale[:, None])[..., None] - table).argmin(-1)
        flat = codes.reshape(-1)
        found["weight"] = (flat[0::2] << 4 | flat[1::2]).astype(np.uint8)[:, None]
        found["weight.quant_map"] = table.astype(np.float32)
        text = json.dumps(state).encode()
        found[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8).copy()
        dense = (table[codes] * scale[:, None]).reshape(weight.shape).astype(np.float32)
        return {name: torch.from_numpy(tensor) for name, tensor in found.items()}, torch.from_numpy(dense)

    return write


def eight_bits(weight: torch.Tensor) -> Written:
    largest = weight.abs().amax(1)
    narrow = (weight / largest[:, None] * 127).round().to(torch.int8)
    found = {"weight": narrow, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return found, narrow.float() * largest[:, None] / 127


def config(**more: Any) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": "bnb_4bit_quant_type" in more,
        "load_in_8bit": False,
        **more,
    }


CASES = {
    "nf4": ("Llama", four_bits("nf4", nested=False), config(bnb_4bit_quant_type="nf4")),
    "nf4-nested": (
        "Llama", four_bits("nf4", nested=True), config(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    ),
    "fp4": ("Qwen3", four_bits("fp4", nested=False), config(bnb_4bit_quant_type="fp4")),
    "int8": ("Llama", eight_bits, config(load_in_8bit=True)),
    "fused": (
        "Phi3", four_bits("nf4", nested=True), config(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    ),
}  # fmt: skip
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(("family", "writer", "settings"), CASES.values(), ids=CASES)
def test_bitsandbytes(
    family: str, writer: writers.Writer, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "SIZES", {**writers.SIZES, **LARGE})
    assert_same_answers(make(tmp_path, family, lambda _: writer, settings))


@pytest.mark.parametrize(("writer", "settings"), [case[1:] for case in CASES.values()], ids=CASES)
def test_ranks_have_their_shares(writer: writers.Writer, settings: dict[str, Any], tmp_path: Path) -> None:
    method, parts = BitsAndBytes.of_checkpoint(settings), {"q": 128, "k": 64, "v": 64}
    checkpoint, dense = written(writer, parts, 512)
    for rank in range(2):
        mine = dense_of(share("rows", rank, 2, parts, 512, method), checkpoint, tmp_path)
        assert torch.allclose(mine, torch.cat([part.chunk(2)[rank] for part in dense]), rtol=1e-5, atol=1e-6)
    checkpoint, (whole,) = written(writer, {"o": 64}, 512)
    shares = [dense_of(share("columns", rank, 2, {"o": 64}, 512, method), checkpoint, tmp_path) for rank in range(2)]
    assert torch.allclose(torch.cat(shares, dim=1), whole, rtol=1e-5, atol=1e-6)


def test_modules_may_end_amid_256_scales(tmp_path: Path) -> None:
    """As those of SmolLM do, and ranks' shares of them."""
    _, writer, settings = CASES["nf4-nested"]
    method, parts = BitsAndBytes.of_checkpoint(settings), {"q": 576, "k": 192, "v": 192}
    checkpoint, dense = written(writer, parts, 576)
    for size in (1, 3):
        for rank in range(size):
            mine = dense_of(share("rows", rank, size, parts, 576, method), checkpoint, tmp_path)
            assert torch.allclose(mine, torch.cat([part.chunk(size)[rank] for part in dense]), rtol=1e-5, atol=1e-6)


def test_parts_of_a_module_may_end_amid_256_scales(tmp_path: Path) -> None:
    """Where a row has an odd number of blocks."""
    _, writer, settings = CASES["nf4-nested"]
    method, parts = BitsAndBytes.of_checkpoint(settings), {"q": 144, "k": 36, "v": 36}
    checkpoint, (whole,) = written(writer, {"qkv": 216}, 320)
    for size in (1, 3):
        for rank in range(size):
            mine = dense_of(share("rows", rank, size, parts, 320, method, fused="qkv"), checkpoint, tmp_path)
            wanted = torch.cat([part.chunk(size)[rank] for part in whole.split([*parts.values()])])
            assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-6)


def test_blocks_are_not_divided() -> None:
    method = BitsAndBytes.of_checkpoint(config(bnb_4bit_quant_type="nf4"))
    with pytest.raises(ConfigError, match="inputs of o are stored 64 together and cannot be cut at 96"):
        share("columns", 0, 2, {"o": 64}, 192, method)


def test_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "SIZES", {**writers.SIZES, **LARGE})
    _, writer, settings = CASES["nf4"]
    folder = make(tmp_path, "Llama", lambda _: writer, settings)
    state = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4"
    for text, words in ((b"{}", "no JSON object with a blocksize"), (b'{"blocksize": 128}', "blocks of 128, 256")):
        state[name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        save_file(state, folder / "model.safetensors")
        with pytest.raises(WeightsError, match=words):
            load(folder)
    for wrong in ({"load_in_4bit": True, "load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "af4"}):
        with pytest.raises(ConfigError, match="must be"):
            BitsAndBytes.of_checkpoint(wrong)
