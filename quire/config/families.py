"""What each family file declares, read as text: looking for one model imports no other, and no torch.

`architectures`: the names it serves. `defaults`: the keys of config.json that it reads, with what they are if the file
does not say (transformers' own defaults). `fixed`: keys that would change the maths, with the values under which the
family's layers are right. `shared`: keys that count what ranks share out; a family without is for one rank.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from quire.config.own_families import family_name
from quire.foundation.errors import ConfigError

# What the engine has to know of a family of the user's own; the rest is that family's business.
_OWN = {"vocab_size": 0, "max_position_embeddings": 0, "rope_parameters": None}
_FOLDER = Path(__file__).parent.parent / "models"


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str  # of its file, without ending; of one of the user's own, as it is registered
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    is_own: bool = False  # a user's: which keys it reads is not known


@cache
def families() -> dict[str, Family]:
    """Family by file name."""
    found = {}
    for file in sorted(_FOLDER.glob("*.py")):
        source = file.read_text(encoding="utf-8")
        if re.search(r"^architectures = ", source, re.MULTILINE):
            found[file.stem] = Family(name=file.stem, **_declared(source))
    return found


def supported() -> dict[str, str]:
    """Architecture → family file, without its ending."""
    return {name: family.name for family in families().values() for name in family.architectures}


def family_of(architecture: str) -> Family:
    """A decoder's trunk, alone or under a classifier, is named after the decoder.

    Raises ConfigError naming the nearest one and all.
    """
    if own := family_name(architecture):
        return Family(name=own, architectures=(architecture,), defaults=_OWN, is_own=True)
    known = supported()
    decoder = re.sub(r"(ForSequenceClassification|ForTokenClassification|Model)$", "ForCausalLM", architecture)
    name = known.get(architecture) or known.get(decoder)
    if name is not None:
        return families()[name]
    near = difflib.get_close_matches(architecture, known, n=1)
    hint = f" (the nearest is {near[0]})" if near else ""
    raise ConfigError(
        f"config.json: architectures[0]={architecture!r} is not supported{hint}; supported: {', '.join(sorted(known))}",
        "model",
    )


def _declared(source: str) -> dict[str, Any]:
    wanted = {"architectures", "defaults", "fixed", "shared"}
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in wanted
    }
