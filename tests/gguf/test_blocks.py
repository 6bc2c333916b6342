"""Blocks of every type stand for the numbers that the format's own library gives, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from quire.config.gguf.folder import gguf_folder
from quire.quantization.base import MatrixInfo
from quire.quantization.blocks import BLOCKS, LIBRARY, SIZES, widened
from quire.quantization.methods.gguf import Gguf
from tests.gguf import writer
from tests.gguf.test_families import build, logits
from tests.models import checkpoints
from tests.quantization.test_shares import dense_of, share

ROWS = 24


def test_sizes_are_those_of_the_library() -> None:
    theirs = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {name: (kind.numbers, kind.num_bytes) for name, kind in SIZES.items()} == {
        name: theirs[name] for name in SIZES
    }


def raw_of(kind: str, seed: int = 0) -> np.ndarray:
    """Any bytes at all, but for those that make no finite numbers."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (400 * ROWS, SIZES[kind].num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wide = gguf.quants.dequantize(raw, Type[kind])
    fine = np.isfinite(wide).all(1) & (np.abs(wide).max(1) < 1e30)
    assert fine.sum() >= 4 * ROWS
    return raw[fine][: 4 * ROWS].reshape(ROWS, -1)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_type_is_widened_bit_for_bit(seed: int) -> None:
    for kind in (*BLOCKS, *LIBRARY):
        raw = raw_of(kind, seed)
        ours, theirs = widened(torch.from_numpy(raw), kind).numpy(), gguf.quants.dequantize(raw, Type[kind])
        assert np.array_equal(ours, theirs), kind


def test_what_is_kept_in_codes_stands_for_the_same_numbers() -> None:
    """Bit for bit without offsets; with one, which becomes a zero, within a rounding of what the group's sum is made
    of: `q * scale - offset` is computed as `(q - offset / scale) * scale`."""
    for kind, layout in BLOCKS.items():
        raw = raw_of(kind)
        columns = raw.shape[1] // SIZES[kind].num_bytes * SIZES[kind].numbers
        info = MatrixInfo(("a",), ROWS, columns, "rows", torch.float32, (ROWS,))
        scheme = Gguf({"types": {"a": kind}}).scheme(info)
        assert scheme.pack is not None
        kept = scheme.pack({"weight": torch.from_numpy(raw)})
        specs = scheme.format.tensors(ROWS, columns, torch.float32)
        assert {name: (tuple(t.shape), t.dtype) for name, t in kept.items()} == {
            n: (s.shape, s.dtype) for n, s in specs.items()
        }
        ours = scheme.format.matrix(kept, None).dense(torch.float32)
        theirs = torch.from_numpy(gguf.quants.dequantize(raw, Type[kind]))
        if not layout.has_offset:
            assert torch.equal(ours, theirs), kind
            continue
        group = theirs.view(ROWS, -1, layout.group)
        most = group.abs().amax(-1, keepdim=True)
        error = (ours.view_as(group) - group).abs()
        assert (error <= 2**-21 * most).all(), kind


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_a_model_in_types_of_256(family: str, tmp_path: Path) -> None:
    """Mixtures of K-quants and code books, dense and with experts, whose numbers are drawn."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 16}
    experts = {"num_local_experts": 4} if family == "Mixtral" else {}
    folder = checkpoints.save(checkpoints.make(family, **sizes, **experts), tmp_path / "plain")
    kinds = {
        "attn_q": Type.Q2_K, "attn_k": Type.IQ3_S, "attn_v": Type.Q6_K, "attn_output": Type.Q3_K,
        "ffn_gate": Type.Q4_K, "ffn_up": Type.Q5_K, "ffn_down": Type.IQ4_XS, "token_embd": Type.Q6_K,
        "output.": Type.IQ2_XXS,
    }  # fmt: skip
    state = writer.write(
        folder,
        tmp_path / "model.gguf",
        "llama",
        lambda name: next((kind for part, kind in kinds.items() if part in name), Type.F32),
    )
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    ours, theirs = build(gguf_folder(tmp_path / "model.gguf")), build(folder)
    for one, other in zip(logits(ours), logits(theirs), strict=True):
        assert other.abs().max() > 0.1
        assert (one - other).abs().max() <= 1e-3 * other.abs().max()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))


def test_ranks_share_parts_of_different_types(tmp_path: Path) -> None:
    types = {"q": Type.Q4_0, "k": Type.Q8_0, "v": Type.F32, "o": Type.Q5_1}
    method = Gguf({"types": {name: kind.name for name, kind in types.items() if kind != Type.F32}})
    parts = {"q": 128, "k": 64, "v": 64}
    checkpoint: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, rows, columns in (*((name, rows, 96) for name, rows in parts.items()), ("o", 64, 128)):
        raw = gguf.quants.quantize(
            np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32), types[name]
        )
        checkpoint[f"{name}.weight"] = torch.from_numpy(raw)
        dense[name] = torch.from_numpy(gguf.quants.dequantize(raw, types[name]))
    for rank in range(2):
        mine = dense_of(share("rows", rank, 2, parts, 96, method), checkpoint, tmp_path)
        assert torch.equal(mine, torch.cat([dense[name].chunk(2)[rank] for name in parts]))
    shares = [dense_of(share("columns", rank, 2, {"o": 64}, 128, method), checkpoint, tmp_path) for rank in range(2)]
    assert (torch.cat(shares, dim=1) - dense["o"]).abs().max() <= 2**-20
