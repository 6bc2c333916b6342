"""Vocabularies of ranks, against tiktoken and mistral-common: the same ids for the same text."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from quire.conversion import ranks
from quire.foundation.errors import ConfigError
from tests.conversion.vocabularies import small_tekken, texts


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Real ones, by rank."""
    file = json.loads(small_tekken("tekken_240911.json", tmp_path_factory.mktemp("tekken"), 4000).read_text())
    return [base64.b64decode(entry["token_bytes"]) for entry in file["vocab"]]


def as_file(tokens: list[bytes]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


@pytest.mark.parametrize("name", ranks.CONVENTIONS)
def test_ids_are_tiktokens(name: str, tokens: list[bytes]) -> None:
    convention = ranks.CONVENTIONS[name]
    reference = tiktoken.Encoding(
        name, pat_str=convention.pattern, mergeable_ranks={t: r for r, t in enumerate(tokens)}, special_tokens={}
    )
    tokenizer = ranks.tiktoken(as_file(tokens), convention, {len(tokens) + 1: "<named>"})
    for text in [*texts(), "中文English混合 ABCdef McDonald's", "1234567 x''s"]:
        assert tokenizer.encode(text).ids == reference.encode(text), text
        assert tokenizer.decode(reference.encode(text)) == text
    assert tokenizer.encode("a<named>b").ids[1] == len(tokens) + 1


def test_special_tokens_of_a_convention(tokens: list[bytes]) -> None:
    qwen = ranks.tiktoken(as_file(tokens), ranks.CONVENTIONS["QWenTokenizer"], {})
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>", "<|extra_204|>"]
    assert [qwen.token_to_id(name) - len(tokens) for name in names] == [0, 1, 2, 3, 207]
    kimi = ranks.tiktoken(as_file(tokens), ranks.CONVENTIONS["TikTokenTokenizer"], {len(tokens) + 2: "<|im_end|>"})
    assert kimi.get_vocab_size() == len(tokens) + 258
    assert kimi.id_to_token(len(tokens) + 2) == "<|im_end|>"
    assert kimi.id_to_token(len(tokens) + 3) == f"<|reserved_token_{len(tokens) + 3}|>"
    llama = ranks.tiktoken(as_file(tokens), ranks.CONVENTIONS["llama"], {})
    assert llama.get_vocab_size() == len(tokens) + 256
    assert [llama.token_to_id(f"<|{name}|>") - len(tokens) for name in ("begin_of_text", "eot_id")] == [0, 9]


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_ids_are_mistral_commons(name: str, tmp_path: Path) -> None:
    file = small_tekken(name, tmp_path)
    reference = Tekkenizer.from_file(file)
    tokenizer, specials = ranks.tekken(json.loads(file.read_text()))
    for text in texts():
        assert tokenizer.encode(text, add_special_tokens=False).ids == reference.encode(text, bos=False, eos=False)
    assert tokenizer.get_vocab_size() == reference.n_words
    assert len(specials) == reference.num_special_tokens
    for number in range(len(specials)):
        assert tokenizer.id_to_token(number) == reference.id_to_piece(number)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "without a gap"),
        (b"YQ== 0\nYg== 2\n", "without a gap"),
        (b"YQ==\n", "unpack"),
        (b"Y!Q= 0\n", "Only base64"),
    ],
)
def test_what_is_no_file_of_ranks(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ranks.parse(data)


@pytest.mark.parametrize("file", [{}, {"config": {}}, {"config": [], "vocab": 3}])
def test_what_is_no_tekken_file(file: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"tekken\.json"):
        ranks.tekken(file)
