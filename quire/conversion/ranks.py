"""Byte-level vocabularies of ranks: tiktoken's files and Mistral's `tekken.json`.

A text is split by a pattern; in each part the two neighbours whose join has the lowest rank are joined, until there
are none (https://github.com/openai/tiktoken). Files hold the ranks; the pattern and the special tokens are known by
the name of the tokenizer's class, or stand in tekken.json.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from quire.foundation.errors import ConfigError
from quire.foundation.pieces import CHARACTERS

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
ONE_DIGIT = rf"{_WORDS}|\p{{N}}|{_REST}"
THREE_DIGITS = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}|{_REST}"
)
# Words end where small letters do, and signs take slashes along (o200k_base, tekken).
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER_LOWER_ONE_DIGIT = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS}"
UPPER_LOWER_THREE_DIGITS = rf"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SIGNS}"
_LLAMA_3 = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(4)),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(5, 251)),
)
_EXTRA = tuple(f"<|extra_{number}|>" for number in range(205))


@dataclass(frozen=True, slots=True)
class Convention:
    """What a class of tokenizers adds to its file of ranks. reserved: how many ids there are for special tokens."""

    pattern: str
    specials: tuple[str, ...] = ()
    reserved: int = 0
    bos: str | None = None
    eos: str | None = None


# By the class that tokenizer_config.json names; "llama" by config.json's model_type.
CONVENTIONS = {
    "QWenTokenizer": Convention(
        ONE_DIGIT, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRA), eos="<|endoftext|>"
    ),
    "TikTokenTokenizer": Convention(KIMI, reserved=258),
    "ChatGLM4Tokenizer": Convention(THREE_DIGITS),
    "llama": Convention(THREE_DIGITS, _LLAMA_3, bos="<|begin_of_text|>", eos="<|end_of_text|>"),
}


def parse(data: bytes) -> list[bytes]:
    """The tokens of a tiktoken file by rank. Raises ValueError for what is none."""
    ranks = {}
    for line in data.splitlines():
        if line:
            token, rank = line.split()
            ranks[int(rank)] = base64.b64decode(token, validate=True)
    if sorted(ranks) != list(range(len(ranks))) or len(ranks) < 256:
        raise ValueError("ranks must be 0, 1, 2 … without a gap")
    return [ranks[rank] for rank in range(len(ranks))]


def build(tokens: Sequence[bytes], pattern: str, before: Sequence[str] = ()) -> Tokenizer:
    """before: special tokens that have the first ids.

    Raises ValueError for one that is a token of the ranks too.
    """
    ids = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for rank, token in enumerate(tokens):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(ids[left], ids[right], rank) for left, right in cuts if left in ids and right in ids]
        merges += sorted(pairs)
    spelled = [_spelled(token) for token in tokens]
    vocabulary = {token: number for number, token in enumerate([*before, *spelled])}
    if len(vocabulary) < len(before) + len(spelled):
        raise ValueError("tokens are there twice")
    model = models.BPE(vocabulary, [(spelled[left], spelled[right]) for left, right, _ in merges])
    model.ignore_merges = True  # a part that is a token is that token
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in before])
    return tokenizer


def tiktoken(data: bytes, convention: Convention, named: dict[int, str]) -> Tokenizer:
    """named: special tokens that the folder's configs give, by id.

    Raises ValueError for what is no file of ranks.
    """
    tokens = parse(data)
    specials = {len(tokens) + place: text for place, text in enumerate(convention.specials)}
    specials |= {number: text for number, text in named.items() if number >= len(tokens)}
    end = max([len(tokens) + convention.reserved, *(number + 1 for number in specials)])
    tokenizer = build(tokens, convention.pattern)
    tokenizer.add_special_tokens(
        [
            AddedToken(specials.get(number, f"<|reserved_token_{number}|>"), normalized=False)
            for number in range(len(tokens), end)
        ]
    )
    return tokenizer


def tekken(file: dict[str, Any]) -> tuple[Tokenizer, list[str]]:
    """And the special tokens, whose ids come before all others'. file: tekken.json.

    Raises ConfigError for a file that lacks what it must have.
    """
    try:
        config = file["config"]
        reserved, size = config["default_num_special_tokens"], config["default_vocab_size"]
        ordered = sorted(file["vocab"], key=lambda entry: entry["rank"])
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in ordered][: size - reserved]
        listed = file.get("special_tokens")
        named = _TEKKEN if listed is None else {entry["rank"]: entry["token_str"] for entry in listed}
        specials = [named.get(number, f"<SPECIAL_{number}>") for number in range(reserved)]
        return build(tokens, config["pattern"], specials), specials
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ConfigError(
            f"tekken.json is not of Mistral's form: {type(error).__name__}: {error}", "tokenizer"
        ) from None


# Of files that do not list theirs (those of 2024-07).
_TEKKEN = dict(
    enumerate(
        [
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
            *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
        ]
    )
)


def _spelled(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)
