"""Vocabularies of GGUF files as tokenizers of the `tokenizers` library.

A file says its tokens by id with their kinds, and for byte-level vocabularies the merges and the name of the convention
by which texts are split; SentencePiece's are joined by scores, as in its own files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.conversion import ranks, sentencepiece
from quire.foundation.errors import ConfigError

_WHOLE = "tokenizer.huggingface.json"
_CONTROL, _USER_DEFINED = 3, 4
_BEGIN = "\u2581"  # of a piece that begins a word
_BRACKETS = re.compile(r"\[.+\]")  # of tokens that are no pieces of words
_NAMES = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator",
    "mask_token": "mask",
}  # fmt: skip
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS_APART = r"\p{N}"
_DEEPSEEK = (
    r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
# Letters that have a case, without modern Georgian and those of mathematics, which DeepSeek's own list lacks.
_CASED = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{10D0}-\x{10FF}\x{1D400}-\x{1D7FF}]]"
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+",
)  # fmt: skip
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SEED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# Patterns that split a text one after the other, by the names that files give their conventions.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "jais", "trillion", "granite-docling", "exaone4"), (_GPT2,)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "smaug-bpe", "chatglm-bpe",
         "glm4", "dbrx", "lfm2"),
        (ranks.THREE_DIGITS,),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "kormo", "grok-2", "solar-open"),
        (ranks.ONE_DIGIT,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum"),
        (_DIGITS_APART, _GPT2),
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "kimi-k2": (ranks.KIMI,),
    "seed-coder": (_SEED,),
    "tekken": (ranks.UPPER_LOWER_ONE_DIGIT,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (ranks.UPPER_LOWER_THREE_DIGITS,)),
}  # fmt: skip
_WHOLE_TOKENS_FIRST = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "tekken",
    "midm-2.0",
    "lfm2",
)
_BEGINS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "tekken")


def build(found: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str], tuple[str | None, str | None]]:
    """found: the file's metadata whose keys begin with `tokenizer.`.

    Returns the tokenizer, its named tokens, and what stands before and behind a text. Raises ConfigError for a
    vocabulary that is not known or does not agree with itself.
    """

    def get(key: str, default: Any = None) -> Any:
        return found.get(f"tokenizer.ggml.{key}", default)

    tokens, kind = get("tokens"), get("model")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ConfigError("the GGUF file has no tokenizer.ggml.tokens: name a tokenizer by --tokenizer", "tokenizer")
    kinds = get("token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ConfigError(f"the GGUF file has {len(tokens)} tokens and {len(kinds)} kinds of them", "tokenizer")
    begins: bool | None = None
    if isinstance(whole := found.get(_WHOLE), str):
        tokenizer = _of_json(whole)
    elif kind == "gpt2":
        tokenizer, begins = _byte_level(tokens, kinds, get("merges"), get("pre", "default"))
    elif kind in ("llama", "gemma4"):
        tokenizer, begins = _of_pieces(tokens, kinds, get), True
    elif kind == "bert":
        return _of_words(tokens, kinds, get)
    else:
        raise ConfigError(
            f"vocabularies of tokenizer.ggml.model={kind!r} are not supported (known: bert, gpt2, llama): name a "
            "tokenizer by --tokenizer",
            "tokenizer",
        )
    ids = {name: get(f"{key}_token_id") for name, key in _NAMES.items()}
    named = {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    if begins is None:
        own = {name: tokenizer.id_to_token(number) for name, number in ids.items() if isinstance(number, int)}
        return tokenizer, {name: text for name, text in own.items() if text is not None}, (None, None)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in named.values()])
    if tokenizer.get_vocab_size() != len(set(tokens)):
        raise ConfigError(
            f"the GGUF file has {len(tokens)} tokens, of which {tokenizer.get_vocab_size()} can be told apart",
            "tokenizer",
        )
    first = named.get("bos_token") if get("add_bos_token", begins) else None
    return tokenizer, named, (first, named.get("eos_token") if get("add_eos_token", False) else None)


def _of_json(text: str) -> Tokenizer:
    """A tokenizer.json that the file holds as a whole. Raises ConfigError."""
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # of the library, which has no class of its own
        raise ConfigError(f"the GGUF file's {_WHOLE} is no tokenizer.json: {error}", "tokenizer") from None


def _byte_level(tokens: list[str], kinds: list[int], merges: Any, name: str) -> tuple[Tokenizer, bool]:
    """And whether texts begin with a token, if the file does not say."""
    if name not in SPLITS:
        raise ConfigError(
            f"the GGUF file's texts are split by the convention tokenizer.ggml.pre={name!r}, which is not known: name "
            "a tokenizer by --tokenizer",
            "tokenizer",
        )
    if not isinstance(merges, list):
        raise ConfigError("the GGUF file has no tokenizer.ggml.merges", "tokenizer")
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocabulary.setdefault(token, number)
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        model = models.BPE(vocabulary, pairs)
    except Exception as error:  # of the library, which has no class of its own
        raise ConfigError(f"the GGUF file's merges do not go with its tokens: {error}", "tokenizer") from None
    model.ignore_merges = name in _WHOLE_TOKENS_FIRST
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    of_kind = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in of_kind if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in of_kind if kind == _USER_DEFINED])
    return tokenizer, name in _BEGINS


def _of_words(
    tokens: list[str], kinds: list[int], get: Any
) -> tuple[Tokenizer, dict[str, str], tuple[str | None, str | None]]:
    """BERT's: files mark pieces that begin a word, and its own vocabularies those that go on with one. Texts are
    lower-cased if hardly any piece has a capital letter: files do not say."""
    vocabulary: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        begins = token.removeprefix(_BEGIN)
        is_whole = kind == _CONTROL or _BRACKETS.fullmatch(token) is not None
        piece = token if is_whole else begins if begins != token else f"##{token}"
        vocabulary.setdefault(piece, number)
    ids = {
        "unk_token": get("unknown_token_id"), "cls_token": get("cls_token_id", get("bos_token_id")),
        "sep_token": get("seperator_token_id", get("eos_token_id")), "pad_token": get("padding_token_id"),
        "mask_token": get("mask_token_id"),
    }  # fmt: skip
    by_id = {number: piece for piece, number in vocabulary.items()}
    named = {name: by_id[number] for name, number in ids.items() if number in by_id}
    if absent := [name for name in ("unk_token", "cls_token", "sep_token") if name not in named]:
        raise ConfigError(f"the GGUF file's vocabulary has no {', no '.join(absent)}", "tokenizer")
    cased = sum(piece != piece.lower() for piece in vocabulary if not _BRACKETS.fullmatch(piece))
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=named["unk_token"], max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=1000 * cased < len(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in named.values()])
    return tokenizer, named, (named["cls_token"], named["sep_token"])


def _of_pieces(tokens: list[str], kinds: list[int], get: Any) -> Tokenizer:
    scores = get("scores") or [0.0] * len(tokens)
    if len(scores) != len(tokens):
        raise ConfigError(f"the GGUF file has {len(tokens)} tokens and {len(scores)} scores", "tokenizer")
    pieces = [sentencepiece.Piece(*piece) for piece in zip(tokens, scores, kinds, strict=True)]
    model = sentencepiece.Model(
        pieces,
        algorithm=sentencepiece.BPE,
        byte_fallback=any(kind == sentencepiece.BYTE for kind in kinds),
        unk=get("unknown_token_id", 0),
        dummy_prefix=bool(get("add_space_prefix", True)),
        remove_extra_spaces=bool(get("remove_extra_whitespaces", False)),
    )
    return sentencepiece.build(model, prefix_everywhere=True)
