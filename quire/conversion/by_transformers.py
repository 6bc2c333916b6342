"""Vocabularies whose pipelines transformers knows by the class of the tokenizer: BPE of vocab.json and merges.txt,
WordPiece of vocab.txt, SentencePiece models whose ids are shifted."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from quire.foundation.errors import ConfigError


def convert_folder(folder: Path, named: dict[str, str]) -> Tokenizer:
    """named: special tokens by name; those that the class has of its own are added.

    Raises ImportError if transformers, or what it needs, is missing, ConfigError for a class it does not know.
    """
    import transformers

    try:
        made = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ImportError:
        raise
    except Exception as error:  # of a library, for whatever stands in the files
        why = str(error).strip().partition("\n")[0]
        raise ConfigError(f"transformers {transformers.__version__} makes no tokenizer of it: {why}") from None
    tokenizer: Tokenizer | None = getattr(made, "backend_tokenizer", None)
    if tokenizer is None or (tokenizer.pre_tokenizer is None and tokenizer.normalizer is None):
        raise ConfigError(
            f"transformers {transformers.__version__} does not know how its texts are split ({type(made).__name__}): "
            "name a folder with a tokenizer.json by --tokenizer",
            "tokenizer",
        )
    for name, text in made.special_tokens_map.items():
        if isinstance(text, str):
            named.setdefault(name, text)
    return tokenizer
