"""Vocabularies of GGUF files: the ids of the tokenizers that they were made of."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from quire.config.files.tokenizer_files import tokenizer_folder
from quire.config.gguf.folder import TOKENIZER
from quire.conversion import gguf_tokenizer
from quire.foundation.errors import ConfigError
from tests.conversion.vocabularies import texts
from tests.frontend.tokenizers_for_tests import CORPUS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))


def made(folder: Path, **values: Any) -> Tokenizer:
    """By the same way as a start."""
    folder.mkdir(exist_ok=True)
    found = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in values.items()}
    (folder / TOKENIZER).write_text(json.dumps(found))
    return Tokenizer.from_file(str(tokenizer_folder(folder) / "tokenizer.json"))


def pieces(lines: Iterable[str], prefix: bool) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=600, model_type="bpe", byte_fallback=True,
        add_dummy_prefix=prefix, remove_extra_whitespaces=False, normalization_rule_name="identity",
        user_defined_symbols=["<|user|>"], minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_those_of_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    model = pieces(CORPUS, prefix)
    count = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else
        4 if model.id_to_piece(i) == "<|user|>" else 1
        for i in range(count)
    ]  # fmt: skip
    tokenizer = made(
        tmp_path / "m", model="llama", tokens=[model.id_to_piece(i) for i in range(count)],
        scores=[model.get_score(i) for i in range(count)], token_type=kinds, bos_token_id=1, eos_token_id=2,
        unknown_token_id=0, add_space_prefix=prefix,
    )  # fmt: skip
    for text in texts():
        if "▁" in text or not text:
            continue
        ids = tokenizer.encode(text).ids
        assert ids == [1, *model.encode(text)], text
        assert tokenizer.decode(ids) == model.decode(model.encode(text)), text


def byte_level(folder: Path, pre: str, **more: Any) -> Tokenizer:
    """The demo model's vocabulary, under a convention."""
    source = json.loads((Path("quire/demo_model/tokenizer.json")).read_text())
    tokens = sorted(source["model"]["vocab"], key=source["model"]["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in source["model"]["merges"]]
    kinds = [3 if number < 3 else 4 if number < 9 else 1 for number in range(len(tokens))]
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "token_type": kinds, "eos_token_id": 2}
    return made(folder, **{**values, **more})


@pytest.mark.parametrize("pre", gguf_tokenizer.SPLITS)
def test_every_convention_gives_texts_back(pre: str, tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / pre, pre)
    for text in texts(20):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    assert tokenizer.encode("a<|im_end|>b", add_special_tokens=False).tokens[1] == "<|im_end|>"


def test_conventions_split_as_they_are_known_to(tmp_path: Path) -> None:
    def parts(pre: str, text: str) -> list[str]:
        pre_tokenizer = byte_level(tmp_path / pre, pre).pre_tokenizer
        return [part.replace("Ġ", " ") for part, _ in pre_tokenizer.pre_tokenize_str(text)]

    text = "We're 12345 HelloWorld's"
    assert parts("gpt-2", text) == ["We", "'re", " 12345", " HelloWorld", "'s"]
    assert parts("llama-bpe", text) == ["We", "'re", " ", "123", "45", " HelloWorld", "'s"]
    assert parts("qwen2", text) == ["We", "'re", " ", "1", "2", "3", "4", "5", " HelloWorld", "'s"]
    assert parts("gpt-4o", text) == ["We're", " ", "123", "45", " Hello", "World's"]
    assert parts("starcoder", text) == ["We", "'re", " ", "1", "2", "3", "4", "5", " HelloWorld", "'s"]
    assert parts("kimi-k2", text) == ["We're", " ", "123", "45", " Hello", "World's"]
    assert parts("deepseek-llm", text) == ["We", "'", "re", " ", "12345", " HelloWorld", "'", "s"]
    assert parts("deepseek-coder", text) == ["We", "'", "re", " ", "1", "2", "3", "4", "5", " HelloWorld", "'", "s"]
    assert parts("seed-coder", text) == ["We", "'re", " ", "1", "2", "3", "4", "5", " HelloWorld", "'s"]
    assert len(parts("kimi-k2", "Hi天空Hi")) == len(parts("deepseek-llm", "Hi天空Hi")) == 3


def test_what_begins_a_text(tmp_path: Path) -> None:
    plain = byte_level(tmp_path / "a", "gpt-2", bos_token_id=1).encode("hello").ids
    assert byte_level(tmp_path / "b", "llama-bpe", bos_token_id=1).encode("hello").ids == [1, *plain]
    assert byte_level(tmp_path / "c", "llama-bpe", bos_token_id=1, add_bos_token=False).encode("hello").ids == plain
    assert byte_level(tmp_path / "d", "gpt-2", bos_token_id=1, add_bos_token=True, add_eos_token=True).encode(
        "hello"
    ).ids == [1, *plain, 2]


@pytest.mark.parametrize("lower", [True, False])
def test_pieces_of_words_are_those_of_bert(lower: bool, tmp_path: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    theirs = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    theirs.normalizer = normalizers.BertNormalizer(lowercase=lower)
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    theirs.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    count = theirs.get_vocab_size()
    tokens = [str(theirs.id_to_token(number)) for number in range(count)]
    marked = [token if token in special else token[2:] if token[:2] == "##" else f"\u2581{token}" for token in tokens]
    ours = made(
        tmp_path / "m", model="bert", pre="default", tokens=marked,
        token_type=[3 if token in special else 1 for token in tokens], unknown_token_id=1, bos_token_id=2,
        seperator_token_id=3, padding_token_id=0, mask_token_id=4,
    )  # fmt: skip
    for text in (*texts(40), "[MASK] HELLO Ångström"):
        told = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).ids == [2, *told, 3] or "[MASK]" in text
    assert ours.encode("[MASK] HELLO").ids[:2] == [2, 4]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pre": "klingon"}, r"tokenizer\.ggml\.pre='klingon', which is not known: name a tokenizer by --tokenizer"),
        ({"model": "rwkv"}, r"tokenizer\.ggml\.model='rwkv' are not supported \(known: bert, gpt2, llama\)"),
        ({"model": "bert"}, "has no unk_token, no cls_token"),
        ({"tokens": []}, r"has no tokenizer\.ggml\.tokens"),
        ({"token_type": [1]}, "4096 tokens and 1 kinds"),
        ({"merges": None}, r"has no tokenizer\.ggml\.merges"),
        ({"merges": ["zz qqqq"]}, "merges do not go with its tokens"),
        ({"tokenizer.huggingface.json": "{"}, "is no tokenizer.json"),
    ],
    ids=lambda _: "",
)
def test_what_is_not_known_is_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        byte_level(tmp_path / "m", **{"pre": "gpt-2", **values})


def test_a_whole_tokenizer_names_its_own_tokens(tmp_path: Path) -> None:
    """Though the list beside it says otherwise."""
    whole = Path("quire/demo_model/tokenizer.json").read_text()
    values = {"tokenizer.huggingface.json": whole, "tokens": [str(number) for number in range(4096)]}
    byte_level(tmp_path / "m", "gpt-2", **values)
    config = json.loads((tokenizer_folder(tmp_path / "m") / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
