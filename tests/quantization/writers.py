"""Quantized checkpoints as each method's files are defined, written without a line of the engine's own.

A writer takes a weight [n, k], float32, and gives the tensors that stand for it, by the name behind the module's, and
what they stand for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models import checkpoints

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
Writer = Callable[[torch.Tensor], Written]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
}  # fmt: skip
MORE_SIZES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "GPTNeoX": {"vocab_size": 128, "head_dim": ...},
    "Qwen3Next": {**_DELTA, "num_experts": 0},
    "Qwen3_5Text": _DELTA,
}
PLAIN = ("embed_tokens", "lm_head", "norm", ".gate.", "block_sparse_moe.gate")


def make(
    folder: Path,
    family: str,
    writer: Callable[[str], Writer | None],
    config: dict[str, Any],
    plain: tuple[str, ...] = PLAIN,
) -> Path:
    """A tiny checkpoint in `folder`/quantized, and what it stands for in `folder`/dense. writer: of a module's name;
    None: it is plain, as are those that have one of `plain` in their names."""
    sizes = MORE_SIZES.get(family, {})
    dense, quantized = folder / "dense", folder / "quantized"
    checkpoints.save(checkpoints.make(family, **{**SIZES, **sizes}), dense)
    state, packed = load_file(dense / "model.safetensors"), {}
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        write = None if tensor.dim() != 2 or any(part in name for part in plain) else writer(module)
        if write is None:
            packed[name] = tensor
            continue
        tensors, state[name] = write(tensor.float())
        packed |= {f"{module}.{part}": value.contiguous() for part, value in tensors.items()}
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, dense / "model.safetensors", {"format": "pt"})
    shutil.copytree(dense, quantized)
    save_file(packed, quantized / "model.safetensors", {"format": "pt"})
    if config:
        checkpoints.rewrite_config(quantized, quantization_config=config)
    return quantized


def reference(folder: Path) -> transformers.PreTrainedModel:
    """transformers with the weights that the checkpoint stands for."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "dense", dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def stream(values: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned numbers along the last axis → int32 words, the lowest bits first."""
    flat = (values[..., None].astype(np.uint32) >> np.arange(bits, dtype=np.uint32)) & 1
    flat = flat.reshape(*values.shape[:-1], -1).astype(np.uint8)
    return np.ascontiguousarray(np.packbits(flat, axis=-1, bitorder="little")).view("<i4")


def grouped(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, index: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q [n, k], scale fp16 [n, groups], zero [n, groups], and what they stand for [n, k]. index: the group of each
    input."""
    w = weight.numpy().astype(np.float64)
    n, k = w.shape
    index = np.arange(k) // group if index is None else index
    count, most = k // group, 2**bits - 1
    low = np.stack([w[:, index == g].min(1) for g in range(count)], 1)
    high = np.stack([w[:, index == g].max(1) for g in range(count)], 1)
    if symmetric:
        scale = (np.maximum(-low, high) * 2 / most).astype(np.float16)
        zero = np.full((n, count), 2 ** (bits - 1))
    else:
        scale = ((np.maximum(high, 0) - np.minimum(low, 0)) / most).astype(np.float16)
        zero = np.clip(np.round(-np.minimum(low, 0) / scale), 0, most)
    step, offset = scale.astype(np.float64)[:, index], zero[:, index]
    q = np.clip(np.round(w / step) + offset, 0, most)
    return q.astype(np.int64), scale, zero.astype(np.int64), ((q - offset) * step).astype(np.float32)


def gptq(
    bits: int, group: int, *, symmetric: bool = True, sort: bool = False, older: bool = True, seed: int = 0
) -> Writer:
    """group -1: all inputs."""

    def write(weight: torch.Tensor) -> Written:
        n, k = weight.shape
        size = k if group == -1 else group
        index = np.arange(k) // size
        if sort:
            index = np.random.default_rng(seed + n).permutation(index)
        q, scale, zero, dense = grouped(weight, bits, size, symmetric=symmetric, index=index)
        words = stream(zero.T, bits)
        if older:  # as a whole number less one in each place, borrows and all
            one = stream(np.ones_like(zero.T), bits)
            words = (words.astype(np.int64) - one.astype(np.int64)).astype(np.uint32).view(np.int32)
        tensors = {
            "qweight": stream(q, bits).T, "qzeros": words, "scales": scale.T, "g_idx": index.astype(np.int32),
        }  # fmt: skip
        return {name: torch.from_numpy(np.ascontiguousarray(t)) for name, t in tensors.items()}, torch.from_numpy(dense)

    return write


def awq(group: int, *, zeros: bool = True) -> Writer:
    def pack(values: np.ndarray) -> np.ndarray:
        """[k, n] → [k, n / 8]: columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on."""
        ordered = values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return stream(ordered.reshape(values.shape), 4)

    def write(weight: torch.Tensor) -> Written:
        size = weight.shape[1] if group == -1 else group
        q, scale, zero, dense = grouped(weight, 4, size, symmetric=not zeros)
        tensors = {"qweight": pack(q.T), "scales": scale.T} | ({"qzeros": pack(zero.T)} if zeros else {})
        return {name: torch.from_numpy(np.ascontiguousarray(t)) for name, t in tensors.items()}, torch.from_numpy(dense)

    return write


def pack_quantized(bits: int, group: int, *, symmetric: bool = True, sort: bool = False) -> Writer:
    """compressed-tensors' packed integers."""

    def write(weight: torch.Tensor) -> Written:
        k = weight.shape[1]
        size = k if group == -1 else group
        index = np.arange(k) // size
        if sort:
            index = np.random.default_rng(weight.shape[0]).permutation(index)
        q, scale, zero, dense = grouped(weight, bits, size, symmetric=symmetric, index=index)
        tensors = {
            "weight_packed": stream(q, bits), "weight_scale": scale, "weight_shape": np.array(weight.shape, np.int64),
        }  # fmt: skip
        if not symmetric:
            tensors["weight_zero_point"] = stream(np.ascontiguousarray(zero.T), bits).T
        if sort:
            tensors["weight_g_idx"] = index.astype(np.int32)
        return {name: torch.from_numpy(np.ascontiguousarray(t)) for name, t in tensors.items()}, torch.from_numpy(dense)

    return write


def integer_bytes(bits: int, group: int, *, symmetric: bool = True) -> Writer:
    """compressed-tensors' integers in a byte each. group -1: all inputs, 0: the whole tensor."""

    def write(weight: torch.Tensor) -> Written:
        n, k = weight.shape
        flat = weight.reshape(1, -1) if group == 0 else weight
        q, scale, zero, dense = grouped(flat, bits, flat.shape[1] if group < 1 else group, symmetric=symmetric)
        half = 2 ** (bits - 1)
        scale = scale.reshape(-1) if group == 0 else scale
        tensors = {"weight": (q.reshape(n, k) - half).astype(np.int8), "weight_scale": scale}
        if not symmetric:
            tensors["weight_zero_point"] = (zero - half).reshape(scale.shape).astype(np.int8)
        found = {name: torch.from_numpy(np.ascontiguousarray(tensor)) for name, tensor in tensors.items()}
        return found, torch.from_numpy(dense.reshape(n, k))

    return write


def settings(folder: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's quantization_config; None removes one."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"] | changes
    kept = {key: value for key, value in config.items() if value is not None}
    checkpoints.rewrite_config(folder, quantization_config=kept)
