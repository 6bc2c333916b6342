"""What each family file declares, read as text: looking for one model imports no other, and no torch.

`architectures`: the names it serves. `defaults`: the keys of config.json that it reads, with what they are if the file
does not say (transformers' own defaults). `fixed`: keys that would change the maths, with the values under which the
family's layers are right. `shared`: keys that count what ranks share out; a family without is for one rank. `aliases`:
what the family's files call keys that all families have, and those (`n_embd` is `hidden_size`). `rotary`: what rotary
settings are if the file does not say; by kind of layer, if those of its layers differ.
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

from quire.config import own_families
from quire.foundation.errors import ConfigError
from quire.foundation.registry import Registry

# What the engine has to know of a family that is not ours; the rest is that family's business.
_OWN_ROTARY = {"partial_rotary_factor": 1.0}
_OWN = {"vocab_size": 0, "max_position_embeddings": 0, "rope_parameters": None}
_INDEXER = "an indexer chooses which tokens its attention sees (DeepSeek Sparse Attention), which there is not"
_FIRST_DEBERTA = "it is DeBERTa of the first version, whose layers differ; versions 2 and 3 are (DebertaV2Model)"
_FIRST_JINA = (
    "it is Jina Embeddings v3 as it was first released, with adapters among the weights and code of its own; in "
    "transformers' form (JinaEmbeddingsV3Model, jinaai/jina-embeddings-v3-hf) it is"
)
_REFUSED = {
    "XLMRobertaLoRA": _FIRST_JINA,
    "DeepseekV32ForCausalLM": _INDEXER,
    "GlmMoeDsaForCausalLM": _INDEXER,
    **{
        f"Deberta{head}": _FIRST_DEBERTA
        for head in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    },
}
# What a decoder's name ends with, and that of one that has another head, or none, or looks both ways.
_GENERATING = ("ForCausalLM", "LMHeadModel")
_HEADS = re.compile(r"(Bidirectional)?(For(Sequence|Token)Classification|For(Process)?RewardModel|Model)$|ForCausalLM$")
_FOLDER = Path(__file__).parent.parent / "models"


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str  # of its file, without ending; of one that is not ours, as it is registered
    module: str = ""
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    rotary: Mapping[str, Any] = field(default_factory=dict)
    is_own: bool = False  # a user's or a package's: which keys it reads is not known


@cache
def families() -> dict[str, Family]:
    """Family by file name."""
    found = {}
    for file in sorted(_FOLDER.rglob("*.py"), key=lambda file: file.stem):
        source = file.read_text(encoding="utf-8")
        if re.search(r"^architectures = ", source, re.MULTILINE):
            path = ".".join(file.relative_to(_FOLDER).with_suffix("").parts)
            found[file.stem] = Family(name=file.stem, module=f"quire.models.{path}", **_declared(source))
    return found


def supported() -> dict[str, str]:
    """Architecture → family file, without its ending."""
    return {name: family.name for family in families().values() for name in family.architectures}


@cache
def model_families() -> Registry:
    """By architecture: our files, and what installed packages have for others."""
    files = {architecture: families()[name].module for architecture, name in supported().items()}
    return Registry("model family", files, contract="quire:ModelRegistry.register_model", needs=("build",))


def family_of(architecture: str) -> Family:
    """A decoder's trunk, alone or under a classifier, is named after the decoder.

    Raises ConfigError naming the nearest one, if there is one.
    """
    if own := own_families.family_name(architecture):
        return Family(name=own, architectures=(architecture,), defaults=_OWN, rotary=_OWN_ROTARY, is_own=True)
    known = supported()
    if architecture not in known and architecture in model_families():
        return Family(name=architecture, architectures=(architecture,), defaults=_OWN, is_own=True)
    stem = _HEADS.sub("", architecture)
    name = known.get(architecture) or next((known[stem + end] for end in _GENERATING if stem + end in known), None)
    if name is not None:
        return families()[name]
    refuse_known(architecture)
    every = sorted(model_families())
    near = difflib.get_close_matches(architecture, every, n=1)
    hint = f" (the nearest is {near[0]})" if near else ""
    raise ConfigError(
        f"config.json: architectures[0]={architecture!r} is not supported{hint}; docs/models.md lists the {len(known)} "
        "that are",
        "model",
        code="architecture",
    )


def refuse_known(architecture: str, named: str | None = None) -> None:
    """Raises ConfigError for an architecture of which it is known why it is not supported. named: what it is called, if
    it is called otherwise."""
    if architecture in _REFUSED:
        raise ConfigError(
            f"config.json: architectures[0]={named or architecture!r} is not supported: {_REFUSED[architecture]}",
            "model",
            code="architecture",
        )


def own_family(name: str) -> Any:
    """What builds models of the family that `family_of` calls so, one of an installed package or of this program's.

    Raises ConfigError if it cannot be imported, or is none.
    """
    installed = model_families()
    return installed.get(name, "model") if name in installed else own_families.find(name)


def _declared(source: str) -> dict[str, Any]:
    wanted = {"architectures", "defaults", "fixed", "shared", "aliases", "rotary"}
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in wanted
    }
