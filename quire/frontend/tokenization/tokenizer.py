"""The tokenizer of a model folder: tokenizer.json for the work, tokenizer_config.json for names and chat templates.

As in transformers 5, tokenizer.json decides which special tokens are put around a text; where it is silent, the name of
an encoder's tokenizer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.config.resolve import Resolved, locate_tokenizer
from quire.foundation.errors import ConfigError, InputError
from quire.foundation.json_file import shown
from quire.foundation.tokenizer_file import read_json, read_tokenizer
from quire.frontend.templates.chat import ChatTemplate, Message, compiled, render
from quire.frontend.text import check_text
from quire.frontend.tokenization import token_lengths
from quire.frontend.tokenization.decoding import Decoding

_MANY = 1024  # ids
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text ↔ token ids.

    `chat_template` is a template's source, or the path of a file that holds it, used instead of the folder's own.
    Raises ConfigError for a folder that holds no tokenizer Quire can read.
    """

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        self.folder = folder
        self.raw = read_tokenizer(folder)
        self.config = read_json(folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(folder, self.config)
        self.decoding = Decoding(self.raw)
        sources = _templates(folder, self.config)
        if chat_template is not None:
            sources = {"default": _template_source(chat_template)}
            compiled(sources["default"])  # a mistake of the operator shows at the start
        self.template = ChatTemplate(sources, self.special_tokens) if sources else None

    # Names and numbers

    @property
    def vocab_size(self) -> int:
        """Tokens without the added ones, as Hugging Face counts; `len(tokenizer)` counts all."""
        return self.raw.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.raw.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        return self.raw.get_vocab()

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.get("pad_token")

    @cached_property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.raw.token_to_id(self.bos_token)

    @cached_property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.raw.token_to_id(self.eos_token)

    @cached_property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self.raw.token_to_id(self.pad_token)

    @cached_property
    def all_special_ids(self) -> list[int]:
        return sorted(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.raw.token_to_id(token)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self.raw.id_to_token(i) for i in ids]

    @cached_property
    def most_characters(self) -> int | None:
        """The most characters of a text that one token stands for; None if that cannot be told."""
        return token_lengths.most_characters(self.raw)

    def least_tokens(self, num_chars: int) -> int:
        """How many tokens a text of so many characters has at least; 0 if nothing is known."""
        return 0 if self.most_characters is None else -(-num_chars // self.most_characters)

    # Text to ids and back

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises InputError for text that is not valid Unicode (lone surrogates)."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` for many texts, in parallel. Other threads of Python go on meanwhile."""
        for text in texts:
            check_text(text, "prompt")
        encodings = self.raw.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Text of token ids. Raises InputError for negative ids; ids without a token have no text."""
        ids = [ids] if isinstance(ids, int) else list(ids)
        if ids and not 0 <= min(ids) <= max(ids) < 2**32:
            raise InputError(f"token ids must be in [0, {2**32}), got {min(ids)} … {max(ids)}", "tokens")
        if len(ids) > _MANY:  # other threads go on meanwhile
            return self.raw.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, its leading space kept; a token may hold only a part of a character."""
        return self.decoding.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """One token by itself; the bytes of a part of a character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    # Chat

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template."""
        return None if self.template is None else self.template.sources.get("default")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """`chat.render` under the name and with the defaults that Hugging Face tokenizers have."""
        template = self.template if chat_template is None else ChatTemplate(chat_template, self.special_tokens)
        text = render(messages, tools, template, add_generation_prompt, continue_final_message, kwargs)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def load_tokenizer(resolved: Resolved) -> Tokenizer | None:
    """The tokenizer an engine was configured with; None with skip_tokenizer_init."""
    folder = locate_tokenizer(resolved)
    return None if folder is None else Tokenizer(folder, resolved.config.model.chat_template)


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … as text; an entry is a string or an object with `content`, null is none."""
    texts: dict[str, str] = {}
    for file, entries in (
        ("special_tokens_map.json", read_json(folder / "special_tokens_map.json")),
        ("tokenizer_config.json", config),
    ):
        for name in _NAMED_TOKENS:
            if name not in entries:
                continue
            token = entries[name]
            text = token.get("content") if isinstance(token, dict) else token
            texts.pop(name, None)
            if isinstance(text, str):
                texts[name] = text
            elif token is not None:
                raise ConfigError(
                    f"{folder}/{file}: {name} must be a string, or an object with content, got {shown(token)}",
                    "tokenizer",
                )
    return texts


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. A chat_template.jinja file comes before the config's string or list."""
    file = folder / "tokenizer_config.json"
    entry = config.get("chat_template")
    if not entry:
        file = folder / "chat_template.json"
        entry = read_json(file).get("chat_template")
    if isinstance(entry, str):
        entry = [{"name": "default", "template": entry}]
    templates = dict(_named_template(item, file) for item in _as_list(entry, file))
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    file = folder / "chat_template.jinja"
    if file.exists():
        templates["default"] = _read_text(file)
    return templates


def _as_list(entry: Any, file: Path) -> list[Any]:
    if entry is not None and not isinstance(entry, list):
        raise ConfigError(f"{file}: chat_template must be a string or a list, got {shown(entry)}", "tokenizer")
    return entry or []


def _named_template(item: Any, file: Path) -> tuple[str, str]:
    if isinstance(item, Mapping) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str):
        return item["name"], item["template"]
    raise ConfigError(
        f"{file}: chat_template must hold objects with name and template, both strings; got {shown(item)}", "tokenizer"
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "chat_template") from None


def _template_source(option: str) -> str:
    """The `chat_template` option: Jinja source, or a file's path."""
    if "{" in option or "\n" in option:
        return option
    file = Path(option).expanduser()
    if not file.is_file():
        raise ConfigError(f"chat_template {option!r} is neither Jinja source nor a file", "chat_template")
    return _read_text(file)
