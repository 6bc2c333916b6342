"""What encoders put around texts and pairs of them where their tokenizer.json does not say it (no post_processor).

As in transformers 5, the tokenizer's class says it then: by its name in tokenizer_config.json, or by the model's type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer, processors


class _Frame(NamedTuple):
    cls: str  # where the config names no others
    sep: str
    pair: str


_BERT = _Frame("[CLS]", "[SEP]", "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1")
_ROBERTA = _Frame("<s>", "</s>", "{cls}:0 $A:0 {sep}:0 {sep}:0 $B:0 {sep}:0")
_FRAMES = {  # by the name of a class without "Tokenizer", as by that of a type
    "bert": _BERT, "distilbert": _BERT, "electra": _BERT, "debertav2": _BERT,
    "roberta": _ROBERTA, "xlmroberta": _ROBERTA, "camembert": _ROBERTA, "mpnet": _ROBERTA,
}  # fmt: skip


def add_frame(tokenizer: Tokenizer, config: Mapping[str, Any], model_type: Any) -> None:
    """Frame texts as the tokenizer's class does, unless its file says how. config: tokenizer_config.json."""
    if tokenizer.post_processor is not None:
        return
    named = config.get("tokenizer_class") or model_type
    if not isinstance(named, str):
        return
    frame = _FRAMES.get(re.sub(r"Tokenizer(Fast)?$|[-_]", "", named).lower())
    if frame is None:
        return
    cls, sep = (_text(config.get(key)) or usual for key, usual in (("cls_token", frame.cls), ("sep_token", frame.sep)))
    ids = [(text, tokenizer.token_to_id(text)) for text in (cls, sep)]
    if all(number is not None for _, number in ids):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0", pair=frame.pair.format(cls=cls, sep=sep), special_tokens=ids
        )


def _text(token: Any) -> str | None:
    """Of a token that is named by its text, or as an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None
