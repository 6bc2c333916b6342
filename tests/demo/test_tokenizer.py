"""The shipped tokenizer loses nothing, keeps digits apart and shows its markers."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from demo import chat, corpus
from demo.tokenizer import MARKERS, SPECIAL, VOCAB_SIZE

MODEL = Path(__file__).parents[2] / "quire" / "demo_model"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\r\n \t\n\n  x  ",
        "naïve e\u0301",
        "漢字かな🙂👩\u200d👩\u200d👧",
        "\x00\x7f\u2028\ufeff",
        "12a3 ٣٤",
        "'s don't",
    ],
)
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_random_text_survives(tokenizer: Tokenizer) -> None:
    rng = Random(1)
    for _ in range(300):
        points = (rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000))) for _ in range(40))
        text = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in (*SPECIAL, *MARKERS)] == list(range(9))
    hidden = tokenizer.decode(tokenizer.encode("".join((*SPECIAL, *MARKERS))).ids, skip_special_tokens=True)
    assert hidden == "".join(MARKERS)


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("2024-11").ids
    assert [tokenizer.decode([i]) for i in ids] == ["2", "0", "2", "4", "-", "1", "1"]


def test_piecewise_encoding_is_whole_encoding(tokenizer: Tokenizer) -> None:
    """Training encodes segments one by one; a server encodes the prompt at once."""
    rng = Random(8)
    for _ in range(200):
        task = corpus.conversation(rng)
        segments = chat.render(task.messages, task.tools, task.thinking)
        whole = tokenizer.encode("".join(segment.text for segment in segments)).ids
        assert [i for segment in segments for i in tokenizer.encode(segment.text).ids] == whole
