"""The demo model's tokenizer: byte-level BPE trained on its own corpus, and the files that go with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo import chat, corpus

VOCAB_SIZE = 4096
SPECIAL = (chat.END_OF_TEXT, chat.IM_START, chat.IM_END)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Words with their leading space, single digits, runs of symbols, line breaks, spaces: nothing is dropped.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|[^\S\r\n]+(?!\S)|[^\S\r\n]+"


def train(documents: int = 40_000, seed: int = 7) -> Tokenizer:
    """Learn the merges from fresh documents; specials come first, markers stay visible when decoding."""

    def texts() -> Iterator[str]:
        rng = Random(seed)
        for _ in range(documents):
            yield from (segment.text for segment in corpus.document(rng))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in (*SPECIAL, *MARKERS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return _show_markers(tokenizer)


def _show_markers(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer makes every reserved token special, which would hide the markers in decoded text."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(state))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and what Hugging Face needs beside it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chat.template())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": chat.IM_END,
        "pad_token": chat.END_OF_TEXT,
        "unk_token": None,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat.template(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
