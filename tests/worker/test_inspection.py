"""What is known of a model before it is loaded, beside what a worker says that has loaded it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.config.hardware import Hardware, parse_bytes
from quire.config.inspection import Findings, Question
from quire.config.resolve import resolve
from quire.foundation.errors import ConfigError
from quire.models import catalog
from quire.worker.inspection import inspect
from quire.worker.worker import Worker
from tests.effort import sampled
from tests.models import checkpoints
from tests.models.cases import CASES, USUAL
from tests.pooling import checkpoints as pooling

GIB = 2**30
HERE = Hardware(device="cpu", name="cpu", total=64 * GIB, free=64 * GIB)
MIXTURE = ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16})


def folder_of(family: str, config: dict[str, Any], folder: Path) -> Path:
    return checkpoints.save(checkpoints.make(family, **config), folder)


def findings(folder: Path, hardware: Hardware = HERE, **options: Any) -> Findings:
    config = EngineConfig.from_flat(model=str(folder), device=hardware.device, **options)
    return inspect(Question(resolve(config, hardware=hardware), hardware))


@pytest.mark.parametrize("case", ["llama-3", "gemma3", "phi3-window", "mixture"])
def test_bytes_and_pages_are_the_workers(case: str, tmp_path: Path) -> None:
    folder = folder_of(*(MIXTURE if case == "mixture" else CASES[case]), tmp_path)
    options = {"dtype": "float32", "max_num_seqs": 3, "cpu_kv_cache_memory_bytes": 10**6}
    worker = Worker(resolve(EngineConfig.from_flat(model=str(folder), device="cpu", **options)))
    report = worker.start()
    try:
        found = findings(folder, **options)
        assert (found.weight_bytes, found.groups) == (report.weight_bytes, report.groups)
        assert (found.num_blocks, found.max_model_len) == (report.num_blocks, report.max_model_len)
        assert found.page_bytes * found.num_blocks == report.kv_bytes
        assert found.attention == report.attention_backend
        stored = sum(parameter.numel() for parameter in worker.model.parameters())
        assert found.parameters == stored == sum(found.weight_formats.values()) // 4
        assert (found.active_parameters < stored) == (case == "mixture")
    finally:
        worker.shutdown()


@pytest.mark.parametrize("case", sampled(list(CASES), USUAL.__contains__))
def test_every_family_is_built_without_its_numbers(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    if ":" in family:
        pytest.skip("made of another family's checkpoint")
    folder = folder_of(family, config, tmp_path)
    resolved = resolve(EngineConfig.from_flat(model=str(folder), device="cpu", dtype="float32"))
    built = catalog.build(resolved.info, torch.float32, torch.device("cpu"), resolved.max_model_len)
    found = findings(folder, dtype="float32")
    assert found.weight_bytes == built.num_bytes()
    assert found.active_parameters == built.num_weights()


def test_models_that_pool(tmp_path: Path) -> None:
    pooling.make("BertForSequenceClassification", tmp_path, num_labels=3)
    found = findings(tmp_path)
    assert found.groups[0].kind == "none"
    assert found.fits[0].requests == 64


def test_a_rank_holds_its_share(tmp_path: Path) -> None:
    folder = folder_of(*CASES["qwen3"], tmp_path)
    gpus = Hardware(device="cuda", name="a GPU", total=GIB, free=GIB, count=2)
    alone, shared = (findings(folder, gpus, tensor_parallel_size=ranks) for ranks in (1, 2))
    assert shared.parameters == alone.parameters
    assert alone.weight_bytes / 2 < shared.weight_bytes < alone.weight_bytes
    assert shared.groups[0].num_kv_heads == alone.groups[0].num_kv_heads // 2


def test_tokens_of_a_step_by_memory(tmp_path: Path) -> None:
    """Mixtures have more where there is plenty, of prompts that nobody waits for."""
    folders = [folder_of(*case, tmp_path / name) for name, case in {"one": ("Llama", {}), "many": MIXTURE}.items()]

    def tokens(gib: int, *, serving: bool = False, **options: Any) -> list[int]:
        hardware = Hardware(device="cuda", name="gpu", total=gib * GIB, free=gib * GIB, count=2)
        configs = [EngineConfig.from_flat(model=str(folder), device="cuda", **options) for folder in folders]
        return [resolve(config, serving=serving, hardware=hardware).max_num_batched_tokens for config in configs]

    assert tokens(24) == [4096, 4096]
    assert tokens(80) == [16384, 16384]
    assert tokens(140) == [16384, 32768]
    assert tokens(140, serving=True) == [8192, 8192]
    assert tokens(140, prefill_context_parallel_size=2) == [32768, 32768]
    assert tokens(140, pipeline_parallel_size=2) == [4096, 4096]
    assert tokens(140, max_num_batched_tokens=9000) == [9000, 9000]


def test_copies_that_share_prompts_hold_all(tmp_path: Path) -> None:
    folder, gpus = (
        folder_of("Llama", {}, tmp_path),
        Hardware(device="cuda", name="gpu", total=8 * GIB, free=8 * GIB, count=4),
    )
    one, three = (findings(folder, gpus, prefill_context_parallel_size=copies) for copies in (1, 3))
    assert (one.weight_bytes, one.groups) == (three.weight_bytes, three.groups)
    assert one.activation_bytes < three.activation_bytes < 2 * one.activation_bytes  # a third each of thrice the tokens
    state = folder_of(*CASES["mamba2-biases"], tmp_path / "state")
    with pytest.raises(ConfigError, match="prefill_context_parallel_size=2: Mamba2ForCausalLM keeps a state"):
        findings(state, prefill_context_parallel_size=2)


def test_formats_and_what_does_not_fit(tmp_path: Path) -> None:
    folder = folder_of(*CASES["llama"], tmp_path)
    small = Hardware(device="cuda", name="a GPU", total=GIB, free=GIB)
    plain = findings(folder, small)
    quantized = findings(folder, small, quantization="fp8")
    assert set(plain.weight_formats) == {"plain"}
    assert set(quantized.weight_formats) == {"plain", "fp8", "int8"}  # the head
    assert sum(quantized.weight_formats.values()) == quantized.weight_bytes < plain.weight_bytes
    assert plain.fits
    assert "lower --max-model-len" in findings(folder, small, kv_cache_memory_bytes=100).too_large


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("80G", 80 * GIB), ("80gb", 80 * 10**9), ("1.5 GiB", GIB * 3 // 2), ("7", 7)],
)
def test_sizes_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text, "memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "-3G", "80 XB", "1e9"])
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="memory must be a size as 80GiB"):
        parse_bytes(text, "memory")
