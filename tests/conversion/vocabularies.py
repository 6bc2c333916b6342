"""Small vocabularies in the forms of others, and texts to try them on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.tokenizers_for_tests import CORPUS

MISTRALS = Path(pytest.importorskip("mistral_common").__file__).parent / "data"
_ALPHABET = "ab  \n\tcdeé你🦙the|'s12.ÅЖ"


def texts(count: int = 60) -> list[str]:
    """Ordinary ones and ones that nobody writes."""
    made = random.Random(0)
    source = "\n".join(CORPUS)
    odd = [
        "",
        " ",
        "  two  spaces ",
        " lead",
        "trail  ",
        "a\nb\n\n c\td",
        "▁odd",
        "x ▁ y",
        "\u0301e",
        "don't DON'T",
        "12345",
    ]
    for _ in range(count):
        begin = made.randrange(len(source) - 80)
        odd.append(source[begin : begin + made.randrange(1, 80)])
        odd.append("".join(made.choice(_ALPHABET) for _ in range(made.randrange(1, 30))))
    return odd


def small_tekken(name: str, folder: Path, size: int = 3000) -> Path:
    """Mistral's file with its first ranks only."""
    file = json.loads((MISTRALS / name).read_text(encoding="utf-8"))
    file["config"]["default_vocab_size"] = size
    file["vocab"] = file["vocab"][: size - file["config"]["default_num_special_tokens"]]
    (folder / "tekken.json").write_text(json.dumps(file), encoding="utf-8")
    return folder / "tekken.json"


def write(folder: Path, **files: Any) -> Path:
    """JSON files by their names without ending."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
