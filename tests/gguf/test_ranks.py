"""GGUF files whose matrices are cut otherwise than checkpoints' are, shared by two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from quire.config.gguf.folder import gguf_folder
from quire.config.model_info import read_model_info
from quire.distributed.topology import Topology
from quire.foundation.errors import ConfigError
from quire.quantization.base import MatrixInfo
from quire.quantization.select import make_method
from tests.distributed.test_sharded_models import compare
from tests.gguf import writer
from tests.gguf.conversions import CONVERSIONS
from tests.gguf.test_families import CASES, MORE, SIZES, mixed
from tests.models import checkpoints

SPLIT: dict[str, dict[str, Any]] = {  # with what a block of 32 can be cut in two
    "granitehybrid": {"shared_intermediate_size": 64},
    "granitehybrid with experts": {"shared_intermediate_size": 64, "intermediate_size": 64},
    "falcon-h1": {"intermediate_size": 128},
    "nemotron_h": {"intermediate_size": 128},
    "qwen3next": {
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    },
}  # fmt: skip
K_QUANTS = {"attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "attn_q": Type.Q2_K, "ffn_up": Type.Q5_K, "attn_k": Type.Q3_K}
LARGE = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 64}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))


def written(case: str, folder: Path, more: dict[str, Any], kinds: Callable[[str], Type] = mixed) -> str:
    """The folder of a file of one of test_families' cases, with other settings."""
    family, arch, config = CASES[case]
    plain = checkpoints.save(checkpoints.make(family, **{**SIZES, **config, **more}), folder / "plain")
    form = case if case in CONVERSIONS else arch
    writer.write(plain, folder / "model.gguf", arch, kinds, more=MORE.get(case), form=form)
    return str(gguf_folder(folder / "model.gguf"))


def k_quants(name: str) -> Type:
    return next((kind for part, kind in K_QUANTS.items() if part in name), Type.Q4_K)


def test_matrices_that_files_have_apart_and_cuts_amid_a_block(tmp_path: Path) -> None:
    """The last: 384 inputs of ffn_down a rank, cut amid a block of 256 at one of its groups of 16."""
    apart = [written(case, tmp_path / case, more) for case, more in SPLIT.items()]
    compare(2, [*apart, written("llama", tmp_path / "llama", LARGE, k_quants)], tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cut_amid_a_group_is_refused_by_every_rank(rank: int, tmp_path: Path) -> None:
    folder = written("llama", tmp_path, {})
    info = read_model_info(Path(folder), {})
    method = make_method(info.quantization["quant_method"], info.quantization)
    ranks = Topology(rank, 2)
    own = ranks.lines(96, 96, "inputs")
    down = MatrixInfo(("model.layers.0.mlp.down_proj",), 64, 96, "columns", torch.float32, (64,), inputs=own[:2])
    with pytest.raises(ConfigError, match=r"inputs of model\.layers\.0\.mlp\.down_proj are stored 32 together.*at 48"):
        method.scheme(down)


@pytest.mark.long
def test_experts_cut_amid_a_block(tmp_path: Path) -> None:
    more = {**LARGE, "moe_intermediate_size": 768}
    compare(2, [written("qwen3moe", tmp_path, more, k_quants)], tmp_path)
