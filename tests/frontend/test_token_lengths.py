"""What proves a text too long without encoding it: never more tokens than it has, and nothing where that is unsure."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from quire.frontend.tokenization.token_lengths import most_characters
from tests.frontend import tokenizers_for_tests

PIECES = [
    "a",
    "the ",
    "  ",
    "\n",
    "é",
    "e\u0301",
    "ﷺ",
    "世界",
    "👩‍👩‍👧",
    "\x00",
    "<|end|>",
    "<tool call>",
    "\u1f82",
    "α\u0313\u0300\u0345",
    ".",
]


def copy(raw: RawTokenizer) -> RawTokenizer:
    return RawTokenizer.from_str(raw.to_str())


def normalized(*steps: normalizers.Normalizer) -> RawTokenizer:
    raw = copy(tokenizers_for_tests.byte_level())
    raw.normalizer = normalizers.Sequence(list(steps))
    return raw


SOUND: dict[str, Callable[[], RawTokenizer]] = {
    "byte level": tokenizers_for_tests.byte_level,
    "byte fallback": tokenizers_for_tests.byte_fallback,
    "nfc": lambda: normalized(normalizers.NFC()),
    "nfkc": lambda: normalized(normalizers.NFKC(), normalizers.Lowercase()),
    "nfkd": lambda: normalized(normalizers.NFKD(), normalizers.Prepend("x")),
    "replace": lambda: normalized(normalizers.Replace("the ", "t"), normalizers.Replace("e\u0301", "e")),
}


@pytest.mark.parametrize("name", SOUND)
def test_no_text_has_fewer_tokens(name: str) -> None:
    raw = SOUND[name]()
    most = most_characters(raw)
    assert most is not None
    draw = random.Random(name)
    texts = [piece * 300 for piece in PIECES]
    texts += ["".join(draw.choices(PIECES, k=draw.randint(1, 60))) for _ in range(300)]
    texts += [token * 20 for token in sorted(raw.get_vocab(), key=len)[-20:]]
    for text in texts:
        assert len(raw.encode(text, add_special_tokens=False).ids) * most >= len(text), text


def with_lstrip() -> RawTokenizer:
    raw = copy(tokenizers_for_tests.byte_level())
    raw.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return raw


def split_removed() -> RawTokenizer:
    raw = copy(tokenizers_for_tests.byte_level())
    split = pre_tokenizers.Split(Regex(" +"), "removed")
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return raw


def fused() -> RawTokenizer:
    return RawTokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))


def word_piece() -> RawTokenizer:
    raw = RawTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return raw


# A tokenizer, and a text of 100,000 characters that is a few tokens.
UNSURE: dict[str, tuple[Callable[[], RawTokenizer], str]] = {
    "white space is dropped": (tokenizers_for_tests.word_level, " " * 100_000),
    "white space is swallowed": (with_lstrip, " " * 100_000 + "<mask>"),
    "white space is removed": (split_removed, " " * 100_000),
    "unknown characters are fused": (fused, "x" * 100_000),
    "unknown words are one token": (word_piece, "x" * 100_000),
    "ends are stripped": (lambda: normalized(normalizers.Strip()), " " * 100_000),
    "runs become one": (lambda: normalized(normalizers.Replace(Regex("x+"), "x")), "x" * 100_000),
    "marks vanish": (lambda: normalized(normalizers.StripAccents()), "a" + "\u0301" * 100_000),
}


@pytest.mark.parametrize("name", UNSURE)
def test_nothing_is_said_where_much_text_may_be_few_tokens(name: str) -> None:
    make, text = UNSURE[name]
    raw = make()
    assert len(raw.encode(text, add_special_tokens=False).ids) < 10
    assert most_characters(raw) is None
