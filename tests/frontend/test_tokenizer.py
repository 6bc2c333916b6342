"""Tokenizer folders as they lie beside checkpoints, held against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from quire.foundation.errors import ConfigError, InputError
from quire.frontend.tokenization.tokenizer import Tokenizer
from tests.frontend.tokenizers_for_tests import CORPUS, byte_fallback, byte_level, save_folder

TEXTS = [*CORPUS[:5], "", " ", "<|end|>x<|start|>", "<tool call>日本語", "a\x00b", "<s>the</s>"]


def theirs(folder: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("raw", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
    ],
    ids=str,
)
def test_ids_and_text_equal_transformers(tmp_path: Path, raw: object, flags: dict[str, bool]) -> None:
    names = ("<|start|>", "<|end|>") if raw is byte_level() else ("<s>", "</s>")
    folder = save_folder(tmp_path, raw, bos_token=names[0], eos_token=names[1], **flags)  # type: ignore[arg-type]
    mine, other = Tokenizer(folder), theirs(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = mine.encode(text, add_special_tokens=special)
            assert ids == other.encode(text, add_special_tokens=special)
            for skip in (True, False):
                expected = other.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert mine.decode(ids, skip_special_tokens=skip) == expected
    assert mine.encode_batch(TEXTS) == [mine.encode(text) for text in TEXTS]
    assert (mine.bos_token_id, mine.eos_token_id) == (other.bos_token_id, other.eos_token_id)
    assert len(mine) == len(other)
    assert mine.vocab_size == other.vocab_size


def test_names_as_objects_and_from_the_old_map(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, byte_level(), eos_token={"content": "<|end|>", "lstrip": False}, pad_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|start|>", "eos_token": "x"}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert tokenizer.pad_token_id is None


def test_tokens_that_only_the_config_knows(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    entries = {
        "0": {"content": "<|end|>", "special": True},
        str(size): {"content": "<|new|>", "special": True},
        str(size + 1): {"content": "<plain new>", "special": False, "lstrip": True},
    }
    tokenizer = Tokenizer(save_folder(tmp_path, byte_level(), added_tokens_decoder=entries))
    assert tokenizer.convert_tokens_to_ids("<|new|>") == size
    assert tokenizer.convert_tokens_to_ids("<plain new>") == size + 1
    assert tokenizer.decode([size, size + 1], skip_special_tokens=True) == "<plain new>"
    assert size in tokenizer.all_special_ids
    assert size + 1 not in tokenizer.all_special_ids


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    raw = type(byte_level()).from_str(byte_level().to_str())
    raw.enable_truncation(max_length=4)
    raw.enable_padding(length=16)
    tokenizer = Tokenizer(save_folder(tmp_path, raw))
    assert tokenizer.encode(CORPUS[0]) == byte_level().encode(CORPUS[0]).ids


def test_one_token_by_itself(tokenizer: Tokenizer) -> None:
    (space_the,) = tokenizer.encode(" the")
    assert tokenizer.token_text(space_the) == " the"
    first_byte = tokenizer.encode("🦄")[0]
    assert tokenizer.token_text(first_byte) == "\ufffd"
    assert tokenizer.token_bytes(first_byte) == "🦄".encode()[: len(tokenizer.token_bytes(first_byte))]
    assert tokenizer.convert_ids_to_tokens([space_the, 10**6]) == ["Ġthe", None]
    assert tokenizer.decode(space_the) == " the"


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_ids_that_no_tokenizer_has(tokenizer: Tokenizer, ids: list[int]) -> None:
    with pytest.raises(InputError, match="token ids"):
        tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "tokenizer.json does not exist"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"tokenizer.json": byte_level().to_str(), "tokenizer_config.json": "{"}, "not valid JSON"),
        ({"tokenizer.json": byte_level().to_str(), "tokenizer_config.json": "[]"}, "JSON object"),
    ],
)
def test_folders_without_a_tokenizer(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        Tokenizer(tmp_path)


def test_where_chat_templates_come_from(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = save_folder(tmp_path, byte_level(), chat_template=named)
    assert Tokenizer(folder).template.sources == {"default": "D", "tool_use": "T"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    (folder / "chat_template.jinja").write_text("J")
    assert Tokenizer(folder).template.sources == {"default": "J", "tool_use": "T", "rag": "R"}
    assert Tokenizer(folder).chat_template == "J"
    (folder / "mine.jinja").write_text("M")
    assert Tokenizer(folder, str(folder / "mine.jinja")).chat_template == "M"
    assert Tokenizer(folder, "{{ 1 }}").chat_template == "{{ 1 }}"
    with pytest.raises(ConfigError, match="neither Jinja source nor a file"):
        Tokenizer(folder, "missing.jinja")
    assert Tokenizer(save_folder(tmp_path / "none", byte_level())).chat_template is None
