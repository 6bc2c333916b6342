"""SentencePiece models, against the library that makes them: the same ids for the same text."""

from __future__ import annotations

import io
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer

from quire.conversion.sentencepiece import build, parse
from quire.foundation.errors import ConfigError
from tests.conversion.vocabularies import MISTRALS, texts
from tests.frontend.tokenizers_for_tests import CORPUS

KINDS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    | {"remove_extra_whitespaces": False},
    "bpe-normalized": {"model_type": "bpe"},
    "bpe-without-prefix": {"model_type": "bpe", "add_dummy_prefix": False, "byte_fallback": True}
    | {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
    "unigram": {"model_type": "unigram"},
    "unigram-bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"}
    | {"remove_extra_whitespaces": False, "vocab_size": 420},
}


def train(**options: Any) -> bytes:
    made = io.BytesIO()
    wanted = {"vocab_size": 400, "character_coverage": 0.98, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS * 3), model_writer=made, **wanted)
    return made.getvalue()


def unlike(data: bytes, tokenizer: Tokenizer, tried: list[str]) -> list[tuple[str, list[str], list[str]]]:
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    return [
        (text, reference.encode(text, out_type=str), tokenizer.encode(text, add_special_tokens=False).tokens)
        for text in tried
        if reference.encode(text) != tokenizer.encode(text, add_special_tokens=False).ids
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library(kind: str) -> None:
    data = train(**KINDS[kind])
    tokenizer = build(parse(data), prefix_everywhere=True)
    assert unlike(data, tokenizer, texts()) == []
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    for text in texts(10):
        ids = reference.encode(text)
        if reference.unk_id() not in ids:
            assert tokenizer.decode(ids) == reference.decode(ids)


def test_a_model_that_is_deployed() -> None:
    data = (MISTRALS / "tokenizer.model.v1").read_bytes()
    assert unlike(data, build(parse(data), prefix_everywhere=True), texts()) == []


def test_user_defined_pieces_are_never_cut() -> None:
    options = {**KINDS["bpe-without-prefix"], "user_defined_symbols": ["<tool>", "\n\n", "▁▁▁"]}
    data = train(**options)
    tried = ["a<tool>b", "x\n\ny\n\n\nz", "one   two    three", "<tool><tool>", "the<tool> the", *texts(20)]
    assert unlike(data, build(parse(data), prefix_everywhere=True), tried) == []


def test_control_pieces_in_a_text_are_special() -> None:
    data = train(**KINDS["bpe"])
    everywhere, first = (build(parse(data), prefix_everywhere=where) for where in (True, False))
    assert everywhere.encode("a</s>b", add_special_tokens=False).tokens == ["▁a", "</s>", "▁b"]
    assert first.encode("a</s>b", add_special_tokens=False).tokens == ["▁a", "</s>", "b"]
    assert first.decode([2, *first.encode("a b", add_special_tokens=False).ids], skip_special_tokens=True) == "a b"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no pieces"),
        (b"\x0a\x05\x0a\x03abc\x0a\xff", "ends inside"),
        (b"\x0b", "unknown kind 3"),
        (b"\xff" * 12, "ten bytes"),
        (b"\x08\x01", "number where a message"),
    ],
)
def test_what_is_no_model(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(data)


@pytest.mark.parametrize("kind", ["word", "char"])
def test_models_of_another_algorithm(kind: str) -> None:
    with pytest.raises(ConfigError, match="only BPE and Unigram"):
        build(parse(train(model_type=kind)), prefix_everywhere=True)
