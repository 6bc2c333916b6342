"""A GGUF file as a model folder: one of the cache, with what the file says in the files that models have, and links to
it. So whoever reads a model's folder reads a GGUF file too; only the weights are read from the file itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.config.gguf.encoders import pooling_files
from quire.config.gguf.settings import config_of, generation_config_of
from quire.foundation.errors import ConfigError
from quire.foundation.folders import cache_folder
from quire.foundation.gguf_header import GgufError, GgufHeader, read_gguf_header

VERSION = 2
"""Of what is made: what an earlier one made is made again."""
TOKENIZER = "gguf_tokenizer.json"
ENDING = ".gguf"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NOT_TEXT = "mmproj"  # the part of a model that sees, in a file of its own
_TEMPLATE = "tokenizer.chat_template"


def split_name(name: str) -> tuple[str, str]:
    """A model and which of its GGUF files: `folder:Q4_K_M`; ("", "") behind it if it says none."""
    model, colon, which = name.rpartition(":")
    return (model, which) if colon and model and re.fullmatch(r"[A-Za-z0-9_.-]+", which) else (name, "")


def gguf_in(path: Path, which: str = "") -> Path | None:
    """The first GGUF file of the model that a path is, or a folder holds; None: it holds none, or other weights too.

    which: a piece of the file's name, as its type. Raises ConfigError if there are several, or none of that name.
    """
    if path.is_file():
        return path if path.suffix == ENDING else None
    if not path.is_dir() or (not which and any(path.glob("*.safetensors"))):
        return None
    found = [file for file in sorted(path.glob(f"*{ENDING}")) if not file.name.lower().startswith(_NOT_TEXT)]
    firsts = [file for file in found if (part := _PART.fullmatch(file.name)) is None or int(part[2]) == 1]
    if not firsts and not which:
        return None
    fitting = [file for file in firsts if which.lower() in file.name.lower()]
    exact = [
        file for file in fitting if re.search(rf"[-._]{re.escape(which)}(-\d{{5}}-of-\d{{5}})?\.gguf$", file.name, re.I)
    ]
    fitting = exact if which and len(exact) == 1 else fitting
    if len(fitting) != 1:
        names = ", ".join(file.name for file in fitting or firsts) or "none"
        told = (
            f"{path} holds no GGUF file with {which!r} in its name"
            if not fitting
            else f"{path} holds several GGUF files"
        )
        raise ConfigError(f"{told} ({names}): name one, as a path or as {path}:TYPE", "model")
    return fitting[0]


def gguf_folder(file: Path) -> Path:
    """The folder of the cache for a GGUF file, or for all parts of one that was split. Raises ConfigError."""
    try:
        files = _parts(file.expanduser())
        stats = [part.stat() for part in files]
        stamp = [
            VERSION,
            *((str(part.resolve()), stat.st_size, stat.st_mtime_ns) for part, stat in zip(files, stats, strict=True)),
        ]
        kept = cache_folder() / "gguf" / hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:32]
        if not (kept / "config.json").exists():
            _make(files, kept)
    except GgufError as error:
        raise ConfigError(f"{file} {error}", "model") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read, or {cache_folder()} not be written: {error}", "model") from None
    return kept


def _parts(file: Path) -> list[Path]:
    """In their order. Raises ConfigError for one that is not there."""
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    stem, _, count = match.groups()
    parts = [file.with_name(f"{stem}-{number:05}-of-{count}{ENDING}") for number in range(1, int(count) + 1)]
    if absent := [part.name for part in parts if not part.is_file()]:
        raise ConfigError(f"{file}: of its {len(parts)} parts {', '.join(absent[:5])} are not there", "model")
    return parts


def read_parts(files: Sequence[Path]) -> tuple[GgufHeader, dict[str, Path]]:
    """As if they were one; and where each tensor is. Raises GgufError, OSError."""
    first, *others = [read_gguf_header(file) for file in files]
    count = first.metadata.get("split.count", 1)
    if count not in (0, len(files)):
        raise GgufError(f"is one of {count} parts, and {len(files)} are there: keep their names, -00001-of-{count:05}")
    tensors, places = dict(first.tensors), dict.fromkeys(first.tensors, files[0])
    for file, header in zip(files[1:], others, strict=True):
        if twice := header.tensors.keys() & tensors.keys():
            raise GgufError(f"and {file.name} both hold {min(twice)}")
        tensors.update(header.tensors)
        places.update(dict.fromkeys(header.tensors, file))
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise GgufError(f"and its other parts hold {len(tensors)} tensors, and should {total}")
    return GgufHeader(first.metadata, tensors), places


def _make(files: Sequence[Path], kept: Path) -> None:
    header, places = read_parts(files)
    made: dict[str, Any] = {
        "config.json": config_of(header, places),
        "generation_config.json": generation_config_of(header.metadata),
        TOKENIZER: {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")},
        **pooling_files(header.metadata),
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as name:
        folder = Path(name, "made")
        folder.mkdir()
        for file_name, value in made.items():
            (folder / file_name).parent.mkdir(exist_ok=True)
            (folder / file_name).write_text(json.dumps(value), encoding="utf-8")
        _write_templates(header.metadata, folder)
        for file in files:
            (folder / file.name).symlink_to(file.resolve())
        shutil.rmtree(kept, ignore_errors=True)
        try:
            os.rename(folder, kept)
        except OSError:
            if not (kept / "config.json").exists():  # else another process was faster
                raise


def _write_templates(metadata: Mapping[str, Any], folder: Path) -> None:
    if isinstance(template := metadata.get(_TEMPLATE), str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for key, value in metadata.items():
        name = key.removeprefix(f"{_TEMPLATE}.")
        if name != key and isinstance(value, str) and re.fullmatch(r"\w+", name):
            more = folder / "additional_chat_templates"
            more.mkdir(exist_ok=True)
            (more / f"{name}.jinja").write_text(value, encoding="utf-8")
