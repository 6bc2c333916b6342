"""Small real tokenizers, trained in a fraction of a second."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello again! Stop here.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))  # three\n",
    "Größe, naïve, café, cafe\u0301, Ångström — “quoted” … 你好，世界。今日は良い天気です。",
    "Привет, мир! مرحبا بالعالم 👋🏽 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301e\u0301 नमस्ते 안녕하세요",
    "the the the then there these those and and end ending STOP STOP\n\nUser: User: Assistant:",
] * 4
SPECIALS = ["<|end|>", "<|start|>", "<|user|>"]


@functools.cache
def byte_level() -> RawTokenizer:
    """GPT-2 style: byte-level BPE, 400 tokens, three special tokens and a plain added one with a space in it."""
    tokenizer = RawTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>", "日本語"])
    return tokenizer


@functools.cache
def byte_fallback(strip: bool = True, decoder: decoders.Decoder | None = None) -> RawTokenizer:
    """Llama-2 style: words begin with ▁, characters out of the vocabulary become bytes, BOS in front."""
    trained = RawTokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=220, special_tokens=["<unk>", "<s>", "</s>"], limit_alphabet=60, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = RawTokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoder or decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@functools.cache
def word_level() -> RawTokenizer:
    """No decoder at all: tokens are joined with spaces."""
    words = sorted({word for line in CORPUS for word in line.split()})
    vocab = {word: i for i, word in enumerate(["<unk>", *words])}
    tokenizer = RawTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    return tokenizer


@functools.cache
def word_piece() -> RawTokenizer:
    """BERT style: words in pieces, `##` before those that go on; text is lower case."""
    tokenizer = RawTokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save_folder(folder: Path, raw: RawTokenizer, **config: object) -> Path:
    """A tokenizer folder as it lies beside a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
