"""Attention by other libraries: what they are told, by their documentation's word, what they answer where they are
there, and why they are not used."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.attention import flashinfer
from quire.attention.base import AttentionBackend
from quire.attention.flash_attn import FlashAttention
from quire.attention.flashinfer import FlashInferAttention
from quire.attention.library import missing
from quire.kernels.dispatch import plain_torch
from tests.attention import stand_ins
from tests.attention.test_sdpa import STEPS
from tests.attention.test_torch_cpu import LIMITS, attend
from tests.attention.test_triton_backend import spec
from tests.e2e.conftest import Reference
from tests.e2e.test_greedy_equals_transformers import prompts, run

BACKENDS: dict[str, tuple[type[AttentionBackend], int]] = {  # and the size of blocks
    "flashinfer": (FlashInferAttention, 16),
    "flash_attn": (FlashAttention, 256),
}


def check(rows: list[tuple[int, int]], dtype: torch.dtype, **options: Any) -> None:
    ours, exact = attend(rows, dtype=dtype, **options)
    assert (ours.double() - exact).norm() / exact.norm() <= LIMITS[dtype]


@pytest.mark.parametrize("window", [None, 1, 9, 300])
@pytest.mark.parametrize("rows", STEPS, ids=lambda rows: str(len(rows)))
@pytest.mark.parametrize("name", BACKENDS)
def test_what_they_are_told(
    name: str, rows: list[tuple[int, int]], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library, module in stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, library, module)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
    make, block_size = BACKENDS[name]
    monkeypatch.setattr(make, "refuses", staticmethod(lambda _: None))
    check(rows, torch.float32, window=window, make=make, block_size=block_size)


def skip_without(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 9, 300])
@pytest.mark.parametrize("rows", STEPS, ids=lambda rows: str(len(rows)))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (14, 2, 64), (16, 8, 128)])
@pytest.mark.parametrize("name", BACKENDS)
def test_what_they_answer(
    name: str, heads: int, kv_heads: int, dim: int, rows: list[tuple[int, int]], window: int | None
) -> None:
    skip_without(name)
    make, block_size = BACKENDS[name]
    check(
        rows, torch.bfloat16, window=window, make=make, block_size=block_size, device="cuda", heads=heads,
        kv_heads=kv_heads, head_dim=dim,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_an_engine_with_them(name: str, tmp_path: Path) -> None:
    """In bfloat16 texts part where two tokens are about as likely: most of them begin as in float32."""
    skip_without(name)
    from tests.models import checkpoints

    reference = checkpoints.make("Qwen3", head_dim=64, vocab_size=199, max_position_embeddings=512)
    folder = checkpoints.save(reference, tmp_path)
    expected, wanted = Reference(folder), prompts(24)
    options = {"dtype": "bfloat16", "attention_backend": name, "block_size": BACKENDS[name][1]}
    found = run(folder, wanted, 16, device="cuda", **options)
    assert sum(tokens[:4] == expected.greedy(prompt, 4) for prompt, tokens in zip(wanted, found, strict=True)) >= 16


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert missing("no_such_library", (1, 0)) == "the package no_such_library is not installed"
    (tmp_path / "old_library.py").write_text("__version__ = '0.1.6.post1'\n")
    (tmp_path / "broken_library.py").write_text("raise OSError('undefined symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing("old_library", (0, 2)) == "old_library 0.1.6.post1 is older than 0.2"
    assert missing("old_library", (0, 1)) is None
    assert "cannot be imported: undefined symbol" in (missing("broken_library", (0, 2)) or "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": torch.float32}, "float16 or bfloat16"),
        ({"kv_dtype": torch.float8_e4m3fn}, "a cache of torch.float8_e4m3fn"),
        ({"head_dim": 24}, "head_dim 24"),
        ({"num_heads": 5}, "5 heads"),
        ({"drafted": (4, 3)}, "drafts"),
        ({"planes": 2}, None),
        ({"block_size": 16}, None),
        ({}, None),
    ],
    ids=str,
)
def test_what_they_refuse(changes: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (FlashInferAttention, FlashAttention):
        monkeypatch.setattr(sys.modules[make.__module__], "missing", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    half = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "block_size": 256, "head_dim": 64}
    wanted = spec("cuda", **(half | changes))
    found = [make.refuses(wanted) or "" for make in (FlashInferAttention, FlashAttention)]
    if said is None:
        assert ("several layers" in found[0]) == ("planes" in changes)
        assert ("set block_size to 256, not 16" in found[1]) == ("block_size" in changes)
    else:
        assert all(said in one for one in found)
    with plain_torch():
        assert all("needs the platform cuda" in (make.refuses(spec("cuda", **half)) or "")
                   for make in (FlashInferAttention, FlashAttention))  # fmt: skip
    assert "needs the platform cuda" in (FlashInferAttention.refuses(spec("cpu", **half)) or "")
