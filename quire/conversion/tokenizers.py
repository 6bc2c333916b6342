"""Tokenizers that come without tokenizer.json, turned into one: the process that does it.

Each in a fork with limits to time and memory, which can write no file and reach no network: what it makes goes back
through a pipe (`quire/config/files/tokenizer_files.py` asks, and keeps it).
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, processors

from quire.conversion import gguf_tokenizer, ranks, sentencepiece
from quire.conversion.job import Job, Made
from quire.conversion.no_network import close_the_network
from quire.foundation.errors import ConfigError
from quire.foundation.fork_server import ForkServer, Limits
from quire.foundation.json_file import read_json_object

LIMITS = Limits(cpu_seconds=300, wall_seconds=600.0, memory_bytes=8 * 1024**3, forks=1)
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
_CONFIG = "tokenizer_config.json"


def work(body: bytes) -> bytes:
    """In the fork: a Job's bytes to a Made's."""
    close_the_network()
    return msgspec.msgpack.encode(convert(msgspec.msgpack.decode(body, type=Job)))


def convert(job: Job) -> Made:
    folder, name = Path(job.folder), job.file
    try:
        config = Config.read(folder)
        if job.kind == "transformers":
            from quire.conversion.by_transformers import convert_folder

            tokenizer = convert_folder(folder, config.named)
        elif job.kind == "tiktoken":
            tokenizer = _tiktoken(folder, name, config)
        elif job.kind == "tekken":
            tokenizer, specials = ranks.tekken(read_json_object(folder / name, "tokenizer"))
            config.name(bos_token=specials[1], eos_token=specials[2], unk_token=specials[0])
            _begin_with(tokenizer, config.named.get("bos_token"))
        elif job.kind == "gguf":
            tokenizer, named, around = gguf_tokenizer.build(read_json_object(folder / name, "tokenizer"))
            config.name(**named)
            _begin_with(tokenizer, *around)
        else:
            tokenizer = _sentencepiece(folder, name, config, is_mistrals=job.kind == "mistral")
    except (ConfigError, ImportError) as error:
        return Made(error=_told(error))
    except (OSError, ValueError, RecursionError) as error:
        return Made(error=f"{name} cannot be read: {error}")
    files, notes = {"tokenizer.json": tokenizer.to_str(), _CONFIG: json.dumps(config.written())}, []
    if job.kind in ("tekken", "mistral") and not config.has_template:
        from quire.conversion.mistral_template import chat_template

        files["chat_template.jinja"], note = chat_template(folder / name)
        notes = [note] if note else []
    return Made({name: text for name, text in files.items() if text}, notes)


def _told(error: ConfigError | ImportError) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    first = str(error).strip().partition("\n")[0]
    return f"its conversion needs a package that is not there ({first}): pip install 'quire[tokenizers]'"


class Config:
    """What the files beside a vocabulary say: named tokens, others that were added, whether texts begin with one."""

    def __init__(
        self, config: dict[str, Any], special: Mapping[str, Any], added: Mapping[str, Any], model: str
    ) -> None:
        self._config, self.model_type = config, model
        given = {**special, **{name: config[name] for name in _NAMES if name in config}}
        self.named: dict[str, str] = {name: text for name in _NAMES if (text := _text_of(given.get(name))) is not None}
        entries = config.get("added_tokens_decoder") or {}
        self.added: dict[int, dict[str, Any]] = {
            int(number): dict(entry) for number, entry in entries.items() if isinstance(entry, Mapping)
        }
        for text, number in added.items():
            self.added.setdefault(int(number), {"content": text, "special": text in self.named.values()})
        self.has_template = bool(config.get("chat_template"))

    @classmethod
    def read(cls, folder: Path) -> Config:
        """Raises ConfigError, ValueError."""

        def of(name: str) -> dict[str, Any]:
            return read_json_object(folder / name, "tokenizer", {})

        made = cls(
            of(_CONFIG), of("special_tokens_map.json"), of("added_tokens.json"), of("config.json").get("model_type", "")
        )
        made.has_template |= any((folder / f"chat_template.{kind}").exists() for kind in ("jinja", "json"))
        return made

    def get(self, key: str, default: Any = None) -> Any:
        value = self._config.get(key)
        return default if value is None else value

    @property
    def class_name(self) -> str:
        return re.sub("Fast$", "", str(self.get("tokenizer_class", "")))

    def name(self, **tokens: str | None) -> None:
        """Named tokens, where the files do not say them."""
        for name, text in tokens.items():
            if text is not None and name not in self._config:
                self.named.setdefault(name, text)

    def written(self) -> dict[str, Any]:
        kept = {key: value for key, value in self._config.items() if key != "auto_map"}
        return {**kept, **{name: text for name, text in self.named.items() if not kept.get(name)}}


def _text_of(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None


def _sentencepiece(folder: Path, name: str, config: Config, *, is_mistrals: bool) -> Tokenizer:
    model = sentencepiece.parse((folder / name).read_bytes())
    for number, entry in config.added.items():
        if number < len(model.pieces) and model.text(number) != entry["content"]:  # a place that was kept free
            model.pieces[number] = sentencepiece.Piece(entry["content"], 0.0, sentencepiece.CONTROL)
    if config.get("add_prefix_space") is False:
        model.dummy_prefix = False
    everywhere = not is_mistrals and config.get("legacy", True) is not False
    tokenizer = sentencepiece.build(model, prefix_everywhere=everywhere)
    config.name(
        bos_token=model.text(model.bos), eos_token=model.text(model.eos), unk_token=model.text(model.unk),
        pad_token=model.text(model.pad),
    )  # fmt: skip
    _add(tokenizer, config)
    bos = config.named.get("bos_token") if config.get("add_bos_token", True) else None
    eos = config.named.get("eos_token") if config.get("add_eos_token", False) else None
    _begin_with(tokenizer, bos, eos)
    return tokenizer


def _tiktoken(folder: Path, name: str, config: Config) -> Tokenizer:
    known = ranks.CONVENTIONS.get(config.class_name) or ranks.CONVENTIONS.get(config.model_type)
    if known is None:
        raise ConfigError(
            f"{name} is a vocabulary of tiktoken's, which does not say how texts are split, and the tokenizer class "
            f"{config.class_name or 'that tokenizer_config.json does not name'!r} is not known: name a folder with "
            "a tokenizer.json by --tokenizer",
            "tokenizer",
        )
    named = {number: entry["content"] for number, entry in config.added.items()}
    tokenizer = ranks.tiktoken((folder / name).read_bytes(), known, named)
    config.name(bos_token=known.bos, eos_token=known.eos)
    _add(tokenizer, config)
    first = config.named.get("bos_token") if config.get("add_bos_token", known.bos is not None) else None
    _begin_with(tokenizer, first, config.named.get("eos_token") if config.get("add_eos_token", False) else None)
    return tokenizer


def _add(tokenizer: Tokenizer, config: Config) -> None:
    """The tokens that only the configs name. Raises ConfigError if one would get another id than they say."""
    for number, entry in sorted(config.added.items()):
        flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
        token = AddedToken(entry["content"], special=bool(entry.get("special")), **{"normalized": False, **flags})
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        got = tokenizer.token_to_id(entry["content"])
        if got != number:
            raise ConfigError(
                f"tokenizer_config.json gives {entry['content']!r} the id {number}, in the vocabulary it has {got}",
                "tokenizer",
            )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in config.named.values()])


def _begin_with(tokenizer: Tokenizer, bos: str | None, eos: str | None = None) -> None:
    """What stands around a text."""
    around = [text for text in (bos, eos) if text is not None]
    if around:
        before, after = (f"{text}:0 " if text else "" for text in (bos, eos))
        single = f"{before}$A:0 {after}".strip()
        pair = f"{single} {single.replace(':0', ':1').replace('$A', '$B')}"
        ids = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(around)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


if __name__ == "__main__":
    ForkServer(socket.socket(fileno=int(sys.argv[1])), work, LIMITS).run()
