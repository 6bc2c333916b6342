"""Every option is checked by its annotation, whoever gives it."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from quire.config import resolve as resolving
from quire.config.engine import SECTIONS, EngineConfig
from quire.config.options import Options, option_types
from quire.config.resolve import resolve
from quire.config.route import RouteConfig
from quire.config.run_batch import RunBatchConfig
from quire.config.serve import ServeConfig
from quire.config.simulate import SimulateConfig
from quire.config.worker import WorkerConfig
from quire.foundation.errors import ConfigError

ALL = [*SECTIONS.values(), ServeConfig, RunBatchConfig, RouteConfig, SimulateConfig, WorkerConfig]
OPTIONS = [(section, name) for section in ALL for name in option_types(section)]
ODD: list[Any] = ["x", 3, -1, 2.5, True, [3], ["x"], {"a": 1}, {1: 2}, object(), float("nan"), torch.int8, b"x"]


def test_every_section_is_checked() -> None:
    assert all(issubclass(section, Options) for section in ALL)


def is_of(value: Any, wanted: Any) -> bool:
    """Whether a value is of an annotation, told by means of our own."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return value in arguments
    if arguments and origin not in (list, dict):
        return any(is_of(value, part) for part in arguments)
    if origin is list:
        return isinstance(value, list) and all(is_of(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if wanted is float:
        return isinstance(value, float) and value == value
    return wanted is Any or type(value) is wanted


@pytest.mark.parametrize(("section", "name"), OPTIONS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_what_is_taken_is_of_its_type_and_the_rest_is_refused_by_name(section: type, name: str) -> None:
    wanted, refused = option_types(section)[name], []
    for value in [*ODD, None]:
        try:
            taken = getattr(section(**{name: value}), name)
        except ConfigError as error:
            refused.append(error)
        else:
            assert is_of(taken, wanted), (value, taken)
    assert len(refused) >= 5
    assert all(error.field == name and name in str(error) for error in refused)


# What a number below all others means; of all others the least is said in the annotation.
ANY_NUMBER = {"seed": "draws of its own"}
NUMBERS = [(s, n) for s, n in OPTIONS if {int, float} & {option_types(s)[n], *typing.get_args(option_types(s)[n])}]


@pytest.mark.parametrize(("section", "name"), NUMBERS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_number_that_is_too_small_is_refused_when_it_is_given(section: type, name: str) -> None:
    if name in ANY_NUMBER:
        assert getattr(section(**{name: -7}), name) == -7
        return
    with pytest.raises(ConfigError, match=rf"{name} must be .*, got -7") as caught:
        section(**{name: -7})
    assert caught.value.field == name


def test_literals_say_what_they_may_be() -> None:
    literals = [(s, n) for s, n in OPTIONS if typing.get_origin(option_types(s)[n]) is Literal]
    assert len(literals) >= 6
    for section, name in literals:
        with pytest.raises(ConfigError) as caught:
            section(**{name: "nonsense"})
        assert ", ".join(typing.get_args(option_types(section)[name])) in str(caught.value)
        assert "'nonsense'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("dtype", torch.bfloat16, "bfloat16"),
        ("dtype", "fp16", "fp16"),
        ("hf_overrides", None, {}),
        ("logits_processors", None, []),
        ("served_model_name", "me", ["me"]),
        ("cuda_graph_sizes", (1, 2), [1, 2]),
        ("max_model_len", np.int64(320), 320),
        ("gpu_memory_utilization", 1, 1.0),
        ("download_dir", Path("/tmp"), "/tmp"),
    ],
)
def test_what_is_meant_is_taken(name: str, given: Any, taken: Any) -> None:
    config = EngineConfig.from_flat(**{name: given})
    (found,) = [getattr(section, name) for section in vars(config).values() if hasattr(section, name)]
    assert found == taken
    assert type(found) is type(taken)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("seed", 10**20, "seed must hold no number of more than 64 bits"),
        ("hf_overrides", {"a": [-(10**20)]}, "hf_overrides must hold no number of more than 64 bits"),
        ("served_model_name", ["m\udcc3"], "served_model_name must be text in UTF-8"),
        ("model", "m\udcc3", "model must be text in UTF-8"),
    ],
)
def test_what_no_other_process_could_be_told_is_refused_by_name(name: str, given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig.from_flat(**{name: given})


def test_defaults_are_of_their_own_types() -> None:
    for section in ALL:
        made = section()
        for field in dataclasses.fields(section):
            assert is_of(getattr(made, field.name), option_types(section)[field.name]), field.name


# -- what is read for them ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"})
    )
    return tmp_path


@pytest.mark.parametrize(
    ("given", "runs"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"), (torch.float16, "float16")],
)
def test_other_words_for_a_dtype(given: Any, runs: str, folder: Path) -> None:
    assert resolve(EngineConfig.from_flat(model=str(folder), dtype=given, device="cpu")).dtype == runs


@pytest.mark.parametrize(
    ("told", "runs"),
    [
        ("float16", "float16"),
        ("torch.float16", "float16"),
        ("bf16", "bfloat16"),
        ("float64", "float32"),
        (None, "bfloat16"),
    ],
)
def test_the_dtype_of_a_config(told: str | None, runs: str, folder: Path) -> None:
    overrides = {"torch_dtype": told}
    assert resolve(EngineConfig.from_flat(model=str(folder), hf_overrides=overrides, device="cpu")).dtype == runs
    with pytest.raises(ConfigError, match="torch_dtype must be one of"):
        resolve(EngineConfig.from_flat(model=str(folder), hf_overrides={"torch_dtype": "int8"}, device="cpu"))


def test_a_named_generation_config_must_be_there(folder: Path, tmp_path: Path) -> None:
    def defaults(**options: Any) -> dict[str, Any]:
        return resolve(EngineConfig.from_flat(model=str(folder), device="cpu", **options)).info.generation_defaults

    assert defaults() == {}
    with pytest.raises(ConfigError, match=r"/nonexistent/generation_config\.json does not exist"):
        defaults(generation_config="/nonexistent")
    (folder / "generation_config.json").write_text('{"temperature": 9, "max_new_tokens": 5}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature must be in \[0, 2\], got 9"):
        defaults()
    assert defaults(generation_config="none") == {}
    (folder / "generation_config.json").write_text('{"temperature": 0.9, "max_new_tokens": 5}')
    assert defaults(generation_config=str(tmp_path)) == {"temperature": 0.9, "max_tokens": 5}


def test_an_architecture_is_refused_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only config.json is asked for; of a known one all is."""
    import huggingface_hub

    asked: list[list[str]] = []

    def fetch(_name: str, *, allow_patterns: list[str], **_options: Any) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    config = EngineConfig.from_flat(model="some/model", device="cpu")
    (tmp_path / "config.json").write_text('{"architectures": ["GPT9LMHeadModel"]}')
    with pytest.raises(ConfigError, match="'GPT9LMHeadModel' is not supported"):
        resolve(config)
    assert asked == [["config.json", "params.json", "adapter_config.json"]]
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert resolve(config).info.path == str(tmp_path)
    assert "*.safetensors" in asked[-1]
    asked.clear()
    resolving.locate_tokenizer(resolving.replace(resolve(config), config=EngineConfig.from_flat(tokenizer="other/one")))
    assert "config.json" not in asked[-1], "a tokenizer's folder needs no known architecture"
