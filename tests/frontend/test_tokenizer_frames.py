"""Tokenizers of encoders whose file does not say what stands around a text: as transformers frames it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from quire.foundation.errors import InputError
from quire.frontend.pooling.prompts import PairEncoder
from quire.frontend.templates.chat import ChatTemplate
from quire.frontend.tokenization.tokenizer import Tokenizer

LETTERS = list("abcdef")
OF_BERT = {
    "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]",
}  # fmt: skip
OF_ROBERTA = {
    "bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "unk_token": "<unk>",
    "pad_token": "<pad>", "mask_token": "<mask>",
}  # fmt: skip


def pieces(named: dict[str, str]) -> RawTokenizer:
    texts = list(dict.fromkeys(named.values()))
    vocabulary = [(text, 0.0) for text in texts]
    vocabulary += [(prefix + letter, -2.0 - len(prefix)) for prefix in ("\u2581", "") for letter in LETTERS]
    made = RawTokenizer(models.Unigram([*vocabulary, ("\u2581", -9.0)], texts.index(named["unk_token"])))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens(texts)
    return made


def words(named: dict[str, str]) -> RawTokenizer:
    texts = [*dict.fromkeys(named.values()), *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    made = RawTokenizer(models.WordPiece({t: i for i, t in enumerate(texts)}, unk_token=named["unk_token"]))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(list(dict.fromkeys(named.values())))
    return made


def saved(folder: Path, raw: RawTokenizer, model_type: str, **config: Any) -> Path:
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


CASES: list[tuple[str, str, Any, dict[str, str]]] = [
    ("XLMRobertaTokenizer", "xlm-roberta", pieces, OF_ROBERTA),  # bge-reranker
    ("XLMRobertaTokenizerFast", "bert", pieces, OF_ROBERTA),
    ("", "xlm-roberta", pieces, OF_ROBERTA),
    ("BertTokenizer", "bert", words, OF_BERT),
    ("", "bert", words, OF_BERT),
    ("", "distilbert", words, OF_BERT),
    ("ElectraTokenizerFast", "electra", words, OF_BERT),
    ("MPNetTokenizer", "mpnet", words, OF_ROBERTA),
    ("DebertaV2TokenizerFast", "deberta-v2", pieces, OF_BERT),
    ("PreTrainedTokenizerFast", "xlm-roberta", pieces, OF_ROBERTA),
]


@pytest.mark.parametrize(("name", "model_type", "make", "named"), CASES)
def test_the_class_frames_texts(name: str, model_type: str, make: Any, named: dict[str, str], tmp_path: Path) -> None:
    config = {**named, **({"tokenizer_class": name} if name else {})}
    folder = saved(tmp_path, make(named), model_type, **config)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    assert ours.encode("ab") == theirs("ab")["input_ids"]
    assert ours.encode("ab", add_special_tokens=False) == theirs("ab", add_special_tokens=False)["input_ids"]
    pair = theirs("ab", "cde")
    (found,) = PairEncoder(ours).encode([("ab", "cde")])
    assert list(found.token_ids) == pair["input_ids"]
    types = pair.get("token_type_ids")
    if types is not None:
        assert found.second_text == (types.index(1) if 1 in types else None)


def test_what_the_file_says_stands(tmp_path: Path) -> None:
    raw = words(OF_BERT)
    raw.post_processor = processors.TemplateProcessing(single="[SEP] $A", pair="$A $B", special_tokens=[("[SEP]", 1)])
    ours = Tokenizer(saved(tmp_path, raw, "bert", tokenizer_class="BertTokenizer", **OF_BERT))
    assert ours.encode("a") == [1, raw.token_to_id("a")]


PAIR = "{% for m in messages if m.role in ('query', 'document') %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "before",
    [
        "{{ instruction }}",
        "{% set instruction = instruction | default('b') %}{{ instruction }}",
        "{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first }}",
    ],
)
def test_an_instruction_reaches_a_template_that_reads_one(before: str, tmp_path: Path) -> None:
    ours = Tokenizer(saved(tmp_path, pieces(OF_ROBERTA), "bert", **OF_ROBERTA))
    encoder = PairEncoder(ours, template=ChatTemplate(before + PAIR), instruction="ab")
    (found,) = encoder.encode([("c", "de")])
    assert list(found.token_ids) == ours.encode("abcde", add_special_tokens=False)


@pytest.mark.parametrize("template", [None, ChatTemplate(PAIR)])
def test_an_instruction_that_nobody_reads_is_refused(template: ChatTemplate | None, tmp_path: Path) -> None:
    ours = Tokenizer(saved(tmp_path, pieces(OF_ROBERTA), "bert", **OF_ROBERTA))
    with pytest.raises(InputError, match="instruction"):
        PairEncoder(ours, template=template, instruction="ab")
