"""JSON files of a model folder that hold odd things: one error that names file and key, or a start that behaves."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.config.engine import EngineConfig
from quire.config.model_info import read_model_info
from quire.config.resolve import resolve
from quire.foundation.errors import ConfigError, WeightsError
from quire.frontend.tokenization.tokenizer import Tokenizer, load_tokenizer
from quire.models import catalog, weights
from tests.models import checkpoints as decoders
from tests.models.paged import PagedRows
from tests.pooling import checkpoints as pooling

GONE = object()
VALUES: list[Any] = [
    None, "x", "", [], [1], ["x"], {}, {"a": 1}, {"1": "x"}, True, -1, 0, 0.5, 1e30, 10**30, math.nan, math.inf,
    GONE,
]  # fmt: skip


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with every file that a folder of a generating model has."""
    folder = tmp_path_factory.mktemp("decoder")
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    extra = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0, "rope_parameters": yarn}
    decoders.save(decoders.make("Qwen2", vocab_size=pooling.VOCAB, num_hidden_layers=2, **extra), folder)
    pooling.save_tokenizer(folder, pairs="")
    token = {"content": "<q>", "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "added_tokens_decoder": {"7": {**token, "single_word": False}},
        "bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}",
        "model_max_length": 128, "tokenizer_class": "X", "add_bos_token": False,
    }  # fmt: skip
    generation = {"eos_token_id": [3], "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "do_sample": True}
    generation |= {"repetition_penalty": 1.1, "max_new_tokens": 7, "pad_token_id": 0, "bos_token_id": 2}
    write(folder / "tokenizer_config.json", tokenizer)
    write(folder / "generation_config.json", generation)
    write(folder / "special_tokens_map.json", {"bos_token": "<s>", "pad_token": {"content": "<pad>"}})
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with sentence-transformers' files."""
    folder = tmp_path_factory.mktemp("classifier")
    pooling.make(
        "BertForSequenceClassification", folder, num_labels=3, id2label={0: "a", 1: "b", 2: "c"}, problem_type=None
    )
    linear = torch.nn.Linear(48, 24)
    pooling.sentence_transformers(
        folder, "Pooling", "Dense", "Normalize", dense=[linear], pooling_mode_mean_tokens=True
    )
    write(
        folder / "config_sentence_transformers.json", {"prompts": {"query": "w1"}, "activation_fn": "torch.nn.Sigmoid"}
    )
    write(folder / "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": False})
    return folder


def write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


def start(folder: Path) -> None:
    """All that a start does short of a cache: files, checks, tokenizer, weights; and one step of a decoder."""
    resolved = resolve(EngineConfig.from_flat(model=str(folder), device="cpu", dtype="float32"))
    load_tokenizer(resolved)
    info, positions = resolved.info, resolved.max_model_len
    if resolved.pooler is not None:
        trunk = catalog.build_for_pooling(info, resolved.pooler, torch.float32, decoders.CPU, positions)
        weights.load(trunk, folder, "auto")
        return
    model = catalog.build(info, torch.float32, decoders.CPU, positions)
    weights.load(model, folder, "auto")
    (logits,) = PagedRows(model, max_rows=1, max_seq_len=16).step([1], [[4, 5, 6]])
    assert logits.isfinite().all()


def places(content: Any) -> Iterator[tuple[str | int, ...]]:
    """Of all values, but those inside a vocabulary."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (key,)
        if isinstance(value, dict | list) and key not in (
            "vocab",
            "label2id",
            "id2label",
            "architectures",
            "layer_types",
        ):
            yield from ((key, *rest) for rest in places(value))


def changed(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at one place."""
    copy = json.loads(json.dumps(content))
    home = copy
    for key in place[:-1]:
        home = home[key]
    if value is GONE:
        del home[place[-1]]
    else:
        home[place[-1]] = value
    return copy


def misbehaviour(folder: Path, file: str, place: tuple[Any, ...], value: Any, original: Any) -> str | None:
    """What is wrong with how a start takes it; None if nothing is."""
    write(folder / file, changed(original, place, value))
    told = f"{file} {place} = {'gone' if value is GONE else value!r}"
    try:
        start(folder)
    except WeightsError:  # a model of other tensors
        return None
    except ConfigError as error:
        text = str(error)
        names = [str(key) for key in place if isinstance(key, str)] or [file]
        if Path(file).name not in text:
            return f"{told}: the file is not named: {text}"
        if len(text) > 600:
            return f"{told}: {len(text)} characters of error"
        if not any(name in text for name in names) and "tokenizer.json" not in file:
            return f"{told}: the key is not named: {text}"
    except BaseException as error:
        return f"{told}: {type(error).__name__}: {error}"[:300]
    finally:
        write(folder / file, original)
    return None


def sweep(folder: Path, file: str, sample: int = len(VALUES)) -> list[str]:
    """What goes wrong with any value at any place; sample: so many values a place, other ones at each."""
    original = json.loads((folder / file).read_text())
    found, turn = [], 0
    for place in places(original):
        for _ in range(sample):
            found.append(misbehaviour(folder, file, place, VALUES[turn % len(VALUES)], original))
            turn += 1
    return [text for text in found if text is not None]


DECODER_FILES = [
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json",
]  # fmt: skip
POOLING_FILES = [
    "config.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json", "config_sentence_transformers.json",
    "sentence_bert_config.json",
]  # fmt: skip


def test_the_folders_themselves_start(decoder: Path, classifier: Path) -> None:
    start(decoder)
    start(classifier)


@pytest.mark.parametrize("file", DECODER_FILES)
def test_keys_of_a_generating_model(file: str, decoder: Path) -> None:
    assert sweep(decoder, file, sample=2) == []


@pytest.mark.parametrize("file", POOLING_FILES)
def test_keys_of_a_pooling_model(file: str, classifier: Path) -> None:
    assert sweep(classifier, file, sample=4) == []


@pytest.mark.long
@pytest.mark.parametrize("file", DECODER_FILES)
def test_every_key_of_a_generating_model(file: str, decoder: Path) -> None:
    assert sweep(decoder, file) == []


@pytest.mark.long
@pytest.mark.parametrize("file", POOLING_FILES)
def test_every_key_of_a_pooling_model(file: str, classifier: Path) -> None:
    assert sweep(classifier, file) == []


@pytest.mark.parametrize(
    ("file", "place", "value", "words"),
    [
        ("config.json", ("text_config",), {"vocab_size": 3}, "text_config="),
        ("config.json", ("rope_parameters", "factor"), "4", "factor must be a finite number"),
        ("config.json", ("eos_token_id",), 151, r"eos_token_id must be in \[0, 151\)"),
        ("generation_config.json", ("temperature",), -1, "temperature must be in"),
        ("tokenizer_config.json", ("eos_token",), 3, "eos_token must be a string"),
    ],
)
def test_an_engine_does_not_start(file: str, place: tuple[str, ...], value: Any, words: str, decoder: Path) -> None:
    """Through the usual door."""
    original = json.loads((decoder / file).read_text())
    write(decoder / file, changed(original, place, value))
    try:
        with pytest.raises(ConfigError, match=rf"(?s){file}.*{words}"):
            LLM(str(decoder), device="cpu", dtype="float32")
    finally:
        write(decoder / file, original)


@pytest.mark.parametrize("value", [None, {}])
def test_an_empty_text_config_is_none(value: Any, decoder: Path) -> None:
    assert read_model_info(decoder, {"text_config": value}).unknown_keys == ()


def test_a_factor_of_null_is_what_the_lengths_say(decoder: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}
    info = read_model_info(decoder, {"rope_scaling": yarn})
    assert (info.hf_config["rope_parameters"]["factor"], info.max_position) == (4.0, 128)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", '"x"', "[" * 100_000, "\xff", "version https://git-lfs.github.com/spec/v1\n"]
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_files_that_are_no_objects(file: str, content: str, decoder: Path) -> None:
    original = (decoder / file).read_bytes()
    (decoder / file).write_bytes(content.encode("latin-1"))
    try:
        with pytest.raises(ConfigError, match=file):
            start(decoder)
    finally:
        (decoder / file).write_bytes(original)


def test_an_adapter_alone_says_what_it_is(tmp_path: Path) -> None:
    write(tmp_path / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "its/base"})
    with pytest.raises(
        ConfigError, match=r"holds an adapter and no model: name its base model, 'its/base', and --enable-lora"
    ):
        start(tmp_path)


def test_an_adapter_beside_a_model_is_said(decoder: Path, tmp_path: Path) -> None:
    shutil.copytree(decoder, tmp_path, dirs_exist_ok=True)
    assert not any(
        "adapter" in note for note in resolve(EngineConfig.from_flat(model=str(tmp_path), device="cpu")).notes
    )
    write(tmp_path / "adapter_config.json", {"peft_type": "LORA"})
    notes = resolve(EngineConfig.from_flat(model=str(tmp_path), device="cpu")).notes
    assert any("adapter_config.json is in the folder too" in note for note in notes)


def test_a_tokenizer_alone_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Tokenizer(tmp_path)
