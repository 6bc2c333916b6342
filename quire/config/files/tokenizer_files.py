"""The folder that a tokenizer is read from: the model's own, or one of the cache, where what the model has instead of
tokenizer.json has been turned into it (`quire/conversion`).

What is there once is found by the hash of the files it was made of, so only the first start converts.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import shutil
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from quire.config.gguf.folder import TOKENIZER
from quire.conversion.job import VERSION, Job, Kind, Made
from quire.foundation.errors import ConfigError
from quire.foundation.folders import cache_folder
from quire.foundation.fork_server import ForkClient
from quire.foundation.log import get_logger

Mode = Literal["auto", "hf", "slow", "mistral"]
_log = get_logger(__name__)
_SECONDS = 630.0  # longer than a fork lives
_MISTRALS_MODEL = re.compile(r"tokenizer\.model\.v\d+(m\d+)?")
_CONFIGS = (
    "config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
    "chat_template.json", "chat_template.jinja",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"
_RANKS_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
# Files of Hugging Face's slow tokenizers, whose classes transformers knows, and those that go with them.
_TRANSFORMERS = {
    "vocab.json": ("merges.txt",),
    "vocab.txt": (),
    "sentencepiece.bpe.model": (),
    "spiece.model": (),
    "spm.model": (),
}


def tokenizer_folder(folder: Path, mode: Mode = "auto") -> Path:
    """`folder`, or one of the cache that holds what its vocabulary was turned into.

    mode: auto and hf read tokenizer.json where it is, else what Hugging Face's slow tokenizers or (auto) Mistral have;
    slow reads the latter even beside a tokenizer.json; mistral reads Mistral's own form and no other.
    Raises ConfigError for a vocabulary that cannot be converted, or if the mode's files are not there.
    """
    if mode in ("auto", "hf") and (folder / "tokenizer.json").exists():
        return folder
    found = _vocabulary(folder, mode)
    if found is None:
        if mode in ("auto", "hf"):
            return folder  # whoever reads it says what is missing
        wanted = (
            "tekken.json or tokenizer.model.v3" if mode == "mistral" else "tokenizer.model, vocab.json or their like"
        )
        raise ConfigError(f"tokenizer_mode={mode} reads {wanted}, and {folder} holds none", "tokenizer_mode")
    kind, names = found
    files = [folder / name for name in (*names, *_CONFIGS) if (folder / name).is_file()]
    kept = cache_folder() / "tokenizers" / _hash(kind, files)
    if not (kept / "tokenizer.json").exists():
        _convert(folder, kind, files, kept)
    return kept


def _vocabulary(folder: Path, mode: Mode) -> tuple[Kind, tuple[str, ...]] | None:
    """What it is, and its files; the first is the vocabulary."""
    if (folder / TOKENIZER).is_file():
        return "gguf", (TOKENIZER,)
    if mode == "mistral":
        return _mistrals(folder)
    ranks = sorted(path.name for path in folder.glob("*.tiktoken"))
    for name in ("tokenizer.model", "tiktoken.model", *ranks):
        if (folder / name).is_file():
            return "tiktoken" if _is_of_ranks(folder / name) else "sentencepiece", (name,)
    for name, others in _TRANSFORMERS.items():
        if all((folder / file).is_file() for file in (name, *others)):
            return "transformers", (name, *others)
    return _mistrals(folder) if mode == "auto" else None


def _mistrals(folder: Path) -> tuple[Kind, tuple[str, ...]] | None:
    if (folder / "tekken.json").is_file():
        return "tekken", ("tekken.json",)
    models = sorted(path.name for path in folder.glob("tokenizer.model.v*") if _MISTRALS_MODEL.fullmatch(path.name))
    return ("mistral", (models[-1],)) if models else None


def _is_of_ranks(file: Path) -> bool:
    """Whether its first line is a token in base 64 and its rank, as in tiktoken's files."""
    with file.open("rb") as stream:
        return _RANKS_LINE.fullmatch(stream.readline(1024)) is not None


def _hash(kind: Kind, files: list[Path]) -> str:
    """Of all that decides what comes out."""
    library = {"transformers": "transformers", "tekken": "mistral-common", "mistral": "mistral-common"}.get(kind)
    found = hashlib.sha256(f"{VERSION} {kind} {library and _version(library)}".encode())
    for file in files:
        found.update(f"\n{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _convert(folder: Path, kind: Kind, files: list[Path], kept: Path) -> None:
    """Raises ConfigError."""
    began, vocabulary = time.perf_counter(), files[0].name
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as name:
            # It sees these files only: no code, and no tokenizer.json that would be taken instead.
            inside, made = Path(name, "in"), Path(name, "out")
            inside.mkdir()
            for file in files:
                (inside / file.name).symlink_to(file.absolute())
            answer = _ask(Job(str(inside), kind, vocabulary), folder)
            _write(answer.files, folder, made)
            try:
                os.rename(made, kept)
            except OSError:
                if not (kept / "tokenizer.json").exists():  # else another process was faster
                    raise
    except OSError as error:
        raise ConfigError(
            f"{kept.parent} cannot be written ({error.strerror or error}), where the tokenizer made of "
            f"{folder}/{vocabulary} is to be kept: set QUIRE_CACHE_DIR to a folder that can",
            "tokenizer",
        ) from None
    for note in answer.notes:
        _log.warning("%s", note)
    _log.info("tokenizer: made of %s in %.1f s, kept in %s", vocabulary, time.perf_counter() - began, kept)


def _write(files: dict[str, str], source: Path, folder: Path) -> None:
    """files: that were made; templates come along as they are."""
    folder.mkdir()
    for name in ("chat_template.jinja", "chat_template.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, folder / _TEMPLATES)
    for name, text in files.items():
        (folder / Path(name).name).write_text(text, encoding="utf-8")


def _ask(job: Job, folder: Path) -> Made:
    """Raises ConfigError for what cannot be converted, or takes more time or memory than it may."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    client = ForkClient("quire.conversion.tokenizers", **quiet)
    answer = b""
    try:
        client.send(1, msgspec.msgpack.encode(job))
        end = time.monotonic() + _SECONDS
        while not answer and select.select([client.socket], [], [], max(end - time.monotonic(), 0))[0]:
            answer = next((body for _, body in client.receive()), b"")
    except (EOFError, OSError):
        pass
    finally:
        client.close()
    if not answer:
        raise ConfigError(
            f"{folder}/{job.file} could not be turned into a tokenizer.json: the process that tries it died, or takes "
            "more time or memory than it may",
            "tokenizer",
        )
    made = msgspec.msgpack.decode(answer, type=Made)
    if made.error:
        raise ConfigError(f"{folder}/{job.file}: {made.error}", "tokenizer")
    return made
