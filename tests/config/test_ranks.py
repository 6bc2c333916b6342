"""What ranks can share, judged from config.json and the machine alone."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.hardware import Hardware
from quire.config.model_info import ModelInfo
from quire.config.parallel import ranks
from quire.config.resolve import resolve
from quire.config.runtime import RuntimeConfig
from quire.foundation.errors import ConfigError
from quire.types.ranks import Rank


def info(architecture: str = "LlamaForCausalLM", **config: Any) -> ModelInfo:
    sizes = {"num_attention_heads": 24, "num_key_value_heads": 4, "intermediate_size": 96}
    return ModelInfo(
        path="", architecture=architecture, hf_config={**sizes, **config}, vocab_size=10, max_position=10,
        eos_token_ids=[], bos_token_id=None, dtype="float32",
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 24])
def test_heads_are_shared_out_or_kept_by_several(size: int) -> None:
    ranks.check_ranks(RuntimeConfig(tensor_parallel_size=size), info(), "cpu")


@pytest.mark.parametrize(
    ("size", "config", "message"),
    [
        (3, {}, r"=3 does not divide this model's num_key_value_heads=4; it may be 1, 2, 4, 8, 12, 24$"),
        (5, {}, r"num_attention_heads=24 and num_key_value_heads=4 and intermediate_size=96"),
        (8, {"intermediate_size": 100}, r"intermediate_size=100; it may be 1, 2, 4$"),
        (16, {"num_key_value_heads": None}, r"num_attention_heads=24 and num_key_value_heads=24"),
        (-1, {}, r"must be >= 1, got -1"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(size: int, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ranks.check_ranks(RuntimeConfig(tensor_parallel_size=size), info(**config), "cpu")


def test_layers_may_each_have_sizes_of_their_own() -> None:
    sizes = {"intermediate_size": [64, 96, 72], "num_attention_heads": 8, "num_key_value_heads": 2}
    assert ranks.possible_sizes(info("Gemma3nForCausalLM", **sizes)) == [1, 2, 4, 8]
    sizes["intermediate_size"] = [64, 90, 90]
    with pytest.raises(ConfigError, match=r"=4 does not divide this model's intermediate_size=90; it may be 1, 2$"):
        ranks.check_ranks(RuntimeConfig(tensor_parallel_size=4), info("Gemma3nForCausalLM", **sizes), "cpu")


def test_heads_of_states_where_files_have_them() -> None:
    """In a section of older files; as many as attention has, if nobody says; a group of them on several ranks."""
    kimi = {"moe_intermediate_size": 24, "linear_num_heads": 32, "linear_attn_config": {"num_heads": 12}}
    assert ranks.possible_sizes(info("KimiLinearForCausalLM", **kimi)) == [1, 2, 3, 4, 6, 12]
    del kimi["linear_attn_config"]
    assert ranks.possible_sizes(info("KimiLinearForCausalLM", **kimi)) == [1, 2, 4, 8]
    assert ranks.possible_sizes(info("OlmoHybridForCausalLM")) == [1, 2, 4, 8, 12, 24]
    assert ranks.possible_sizes(info("OlmoHybridForCausalLM", linear_num_value_heads=6)) == [1, 2]
    zamba = {"num_key_value_heads": 24, "n_mamba_heads": 16, "mamba_ngroups": 2}
    assert ranks.possible_sizes(info("Zamba2ForCausalLM", **zamba)) == [1, 2, 4, 8]


def test_encoders_are_shared_too() -> None:
    ranks.check_ranks(RuntimeConfig(tensor_parallel_size=2), info("BertModel"), "cpu")


def test_what_ranks_and_stages_need_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "num_gpus", lambda: 4)
    both = RuntimeConfig(tensor_parallel_size=2, pipeline_parallel_size=4)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=4 needs 8 GPUs, and this process may use 4"):
        ranks.check_ranks(both, info(), "cuda")


def test_copies_that_share_prompts_need_gpus_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "num_gpus", lambda: 4)
    ranks.check_ranks(RuntimeConfig(tensor_parallel_size=2, prefill_context_parallel_size=2), info(), "cuda")
    for options, message in (
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2, prefill_context_parallel_size=3 needs 6 GPUs"),
        ({"prefill_context_parallel_size": 5}, "^prefill_context_parallel_size=5 needs as many GPUs"),
    ):
        runtime = RuntimeConfig(**{"prefill_context_parallel_size": 3, **options})
        with pytest.raises(ConfigError, match=message) as refused:
            ranks.check_ranks(runtime, info(), "cuda")
        assert refused.value.field == "prefill_context_parallel_size"


def test_where_a_rank_stands() -> None:
    stages = [Rank(index, 6, stages=3) for index in range(6)]
    assert [(rank.stage, rank.context, rank.lane) for rank in stages] == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1)
    ]  # fmt: skip
    assert [rank.samples for rank in stages] == [False] * 4 + [True, False]
    copies = [Rank(index, 6, contexts=3) for index in range(6)]
    assert [(rank.stage, rank.context, rank.lane) for rank in copies] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)
    ]  # fmt: skip
    assert [rank.samples for rank in copies] == [True] + [False] * 5


def test_steps_grow_with_the_copies() -> None:
    sizes = {}
    for copies in (1, 3):
        for given in (None, 100):
            config = EngineConfig.from_flat(
                device="cpu", prefill_context_parallel_size=copies, max_num_batched_tokens=given
            )
            sizes[copies, given] = resolve(config).max_num_batched_tokens
    assert sizes == {(1, None): 2048, (3, None): 3 * 2048, (1, 100): 100, (3, 100): 100}


@pytest.mark.parametrize(
    ("ranks", "hidden", "gib", "serving", "most"),
    [
        (1, 64, 140, False, 16384), (2, 64, 140, False, 32768), (2, 64, 140, True, 8192), (2, 64, 80, False, 16384),
        (2, 5120, 140, False, 25 * 1024), (2, 8192, 140, False, 16384),
    ],
)  # fmt: skip
def test_steps_that_ranks_share_are_larger(ranks: int, hidden: int, gib: int, serving: bool, most: int) -> None:
    memory = gib * 1024**3
    hardware = Hardware(device="cuda", name="a GPU", total=memory, free=memory, count=ranks)
    config = EngineConfig.from_flat(
        device="cuda", tensor_parallel_size=ranks, hf_overrides={"hidden_size": hidden, "head_dim": 16}
    )
    assert resolve(config, serving=serving, hardware=hardware).max_num_batched_tokens == most


@pytest.mark.parametrize("option", ["max_num_batched_tokens", "max_prefill_chunk"])
def test_steps_that_are_too_small_to_share(option: str) -> None:
    for most in (47, 48):
        config = EngineConfig.from_flat(device="cpu", prefill_context_parallel_size=3, **{option: most})
        if most == 48:
            resolve(config)
            continue
        with pytest.raises(ConfigError, match=rf"prefill_context_parallel_size=3 .* {option} must be >= 48, got 47"):
            resolve(config)


def test_a_group_of_heads_is_kept_by_several() -> None:
    sizes = {"mamba_n_heads": 8, "mamba_n_groups": 1, "num_attention_heads": 8, "num_key_value_heads": 2}
    ranks.check_ranks(RuntimeConfig(tensor_parallel_size=4), info("BambaForCausalLM", **sizes), "cpu")
    with pytest.raises(ConfigError, match=r"mamba_n_heads=6; it may be 1, 2$"):
        ranks.check_ranks(
            RuntimeConfig(tensor_parallel_size=4), info("BambaForCausalLM", **{**sizes, "mamba_n_heads": 6}), "cpu"
        )


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("0,1", 2), ("3", 1), ("", 0), ("1,-1,2", 1), ("GPU-a,GPU-b,GPU-c", 3), ("0,1,2,3,4", 4)],
)
def test_gpus_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    def give_count(pointer: Any) -> int:
        pointer._obj.value = 4
        return 0

    library = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetCount_v2=give_count)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ranks.num_gpus() == count
    if count < 4:
        with pytest.raises(ConfigError, match=f"=4 needs as many GPUs, and this process may use {count}"):
            ranks.check_ranks(RuntimeConfig(tensor_parallel_size=4), info(), "cuda")
