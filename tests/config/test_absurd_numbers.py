"""Numbers that nothing has: each key of a model's files that says one is refused by name, or means nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.cli.inspect_model import look
from quire.config.engine import EngineConfig
from quire.config.inspection import Question
from quire.config.model_info import read_model_info
from quire.foundation.errors import ConfigError, WeightsError
from quire.models.adapters.tensors import pair_of
from quire.worker.inspection import inspect
from tests.models import checkpoints, sparse_checkpoints
from tests.models.cases import CASES

ABSURD = (2**63, 2**64, 10**40, 1e308, -(2**70), 0, -1)
Place = tuple[Any, ...]


def numbers(value: Any, path: Place = ()) -> Iterator[Place]:
    """Where a file has any."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def changed(value: Any, path: Place, number: float) -> Any:
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = number
    return copy


def inspected(folder: Path) -> list[str]:
    """As `quire inspect` does: the problems that it found."""
    report, question = look(EngineConfig.from_flat(model=str(folder), device="cpu", max_model_len=64))
    if question is not None:
        try:
            inspect(msgspec.msgpack.decode(msgspec.msgpack.encode(question), type=Question))
        except ConfigError as error:
            report.note(error)
    return report.problems


def survives(folder: Path, name: str, *, within: str = "") -> None:
    """Whatever number a file says. within: of a section alone."""
    file = folder / name
    given = json.loads(file.read_text())
    for path in numbers(given):
        for number in ABSURD if not within or path[0] == within else ():
            file.write_text(json.dumps(changed(given, path, number)))
            with contextlib.suppress(ConfigError):
                inspected(folder)
    file.write_text(json.dumps(given))


@pytest.mark.parametrize("case", ["llama", "lfm2", pytest.param("deepseek3", marks=pytest.mark.long)])
def test_of_config_json(case: str, tmp_path: Path) -> None:
    family, sizes = {**CASES, **sparse_checkpoints.CASES}[case]
    survives(checkpoints.save(checkpoints.make(family, **sizes), tmp_path), "config.json")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoints.save(checkpoints.make("Llama"), tmp_path)


GROUPS = {"num_bits": 4, "group_size": 16, "symmetric": True, "type": "int", "strategy": "group"}
METHODS: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 16, "damp_percent": 0.1},
    {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True},
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]},
    {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUPS}},
    },
    {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 16, "axis": 1}}},
    {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 16}}},
    },
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
)


@pytest.mark.parametrize("settings", METHODS, ids=lambda settings: str(settings["quant_method"]))
def test_of_a_quantization_method(settings: dict[str, Any], llama: Path) -> None:
    checkpoints.rewrite_config(llama, quantization_config=settings)
    survives(llama, "config.json", within="quantization_config")


def test_of_a_quantization_method_in_a_file_of_its_own(llama: Path) -> None:
    file = llama / "quantize_config.json"
    file.write_text(json.dumps({"bits": 4, "group_size": 2**64}))
    with pytest.raises(ConfigError, match=rf"{file}: group_size must have at most 64 bits, got {2**64}"):
        read_model_info(llama, {})


def test_of_generation_config_json(llama: Path) -> None:
    told = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 20, "eos_token_id": [2, 3]}
    (llama / "generation_config.json").write_text(json.dumps({**told, "num_beams": 1}))
    survives(llama, "generation_config.json")


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_file_and_key_are_named(number: int, llama: Path) -> None:
    checkpoints.rewrite_config(llama, rms_norm_eps=number)
    with pytest.raises(
        ConfigError, match=rf"{llama}/config.json: rms_norm_eps must have at most 64 bits, got {number}"
    ):
        read_model_info(llama, {})
    checkpoints.rewrite_config(llama, rms_norm_eps=1e-5, quantization_config={"quant_method": "gptq", "bits": number})
    with pytest.raises(ConfigError, match=r"config.json: quantization_config.bits must have at most 64 bits"):
        read_model_info(llama, {})


def test_what_means_nothing_may_be_as_long_as_it_likes(llama: Path) -> None:
    checkpoints.rewrite_config(
        llama, tokenizer_model_max_length=int(1e30), max_length=10**400, nobody=[{"knows": 2**64}]
    )
    assert inspected(llama) == []


@pytest.mark.parametrize("case", ["kimi_linear", "deepseek3"])
def test_an_odd_number_of_rotary_columns(case: str, tmp_path: Path) -> None:
    family, sizes = {**CASES, **sparse_checkpoints.CASES}[case]
    folder = checkpoints.save(checkpoints.make(family, **sizes), tmp_path)
    checkpoints.rewrite_config(folder, qk_rope_head_dim=1, head_dim=None)
    assert inspected(folder) == ["config.json: qk_rope_head_dim=1 must be even: columns turn in pairs"]
    checkpoints.rewrite_config(folder, qk_rope_head_dim=0)
    assert "config.json: qk_rope_head_dim must be >= 1, got 0" in inspected(folder)


def test_a_scale_that_makes_infinities_of_an_adapter() -> None:
    class Told:
        use_dora = False

        def rank_of(self, _module: str) -> int:
            return 2

        def scale_of(self, _module: str) -> float:
            return 1e308

    tensors = {"lora_A": torch.ones(2, 3), "lora_B": torch.ones(4, 2)}
    with pytest.raises(WeightsError, match=r"q\.lora_B times 1e\+308, which lora_alpha and the rank make, is infinite"):
        pair_of(Told(), "q", tensors, 4, 3)  # type: ignore[arg-type]
