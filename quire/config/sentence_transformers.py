"""What sentence-transformers, and PyLate after it, keep beside a model: a chain of modules in modules.json
(Transformer, Pooling, Dense, Normalize, …), each with a folder of its own; prompts, and how vectors are compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.config.reading import read, read_positive, read_section
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import read_json, read_json_object, shown

FILE = "config_sentence_transformers.json"
# weighted: a mean in which later tokens count for more; root: sums divided by the root of the number of tokens. Of what
# the head makes of every token: late, their mean; splade_max and splade_sum, in logarithms.
Mode = Literal["cls", "last", "mean", "max", "weighted", "root", "late", "splade_max", "splade_sum"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan", "maxsim"]
# Words for each mode, in either spelling of a Pooling module's config.
POOLINGS: dict[str, Mode] = {
    "cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean",
    "max": "max", "max_tokens": "max", "lasttoken": "last", "last": "last", "weightedmean": "weighted",
    "weightedmean_tokens": "weighted", "mean_sqrt_len_tokens": "root", "mean_sqrt_len": "root",
}  # fmt: skip
_SQUASHES = {"relu": 1, "log1p_relu": 2}
_SIMILARITIES: dict[str, Similarity] = {
    "cosine": "cosine", "dot": "dot", "dot_product": "dot", "euclidean": "euclidean", "manhattan": "manhattan",
    "maxsim": "maxsim",
}  # fmt: skip
_SILENT = ("Transformer", "MLMTransformer", "LogitScore")  # that say nothing here


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """A layer behind the pooling, in a folder of its own."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str  # its class in torch.nn: Identity, Tanh …


@dataclass(frozen=True, kw_only=True)
class Splade:
    """Weights of all words, of what a masked language model makes of every token."""

    mode: Mode = "splade_max"
    squashes: int = 1  # times that ln(1 + x) is taken of weights


@dataclass(frozen=True, kw_only=True)
class Chain:
    mode: Mode | None  # None: it does not say
    dense: tuple[DenseLayer, ...]
    normalize: bool  # without modules vectors are
    splade: Splade | None
    is_late: bool  # vectors are of tokens, and compared one by one
    include_prompt: bool
    prompts: tuple[tuple[str, str], ...]  # what texts of a kind should begin with: (kind, words)
    default_prompt: str  # the kind that a text is of if nobody says; "": none
    similarity: Similarity | None
    max_tokens: int | None


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """The chain of modules; [] if there is none."""
    found = read_json(folder / "modules.json", "model", [])
    if not isinstance(found, list) or not all(isinstance(module, Mapping) for module in found):
        raise ConfigError(f"{folder}/modules.json must hold a list of objects, got {shown(found)}", "model")
    return [_check_module(folder, dict(module)) for module in found]


def _check_module(folder: Path, module: dict[str, Any]) -> dict[str, Any]:
    """With a type, and a path that names a folder of the model's own, or itself."""
    file = f"{folder}/modules.json"
    path = read(str, module, "path", "", file=file)
    if path and (not re.fullmatch(r"[\w.-]+", path) or path in (".", "..")):
        raise ConfigError(f"{file}: path {path!r} is no folder beside it", "model")
    return {**module, "type": read(str, module, "type", file=file), "path": path}


def chain(folder: Path, modules: list[dict[str, Any]]) -> Chain:
    """What the modules and the files beside them say. Raises ConfigError for what is not known."""
    mode: Mode | None = None
    splade: Splade | None = None
    dense, normalize, include_prompt, is_late = [], not modules, True, False
    for module in modules:
        kind, path = module["type"].rpartition(".")[2], module["path"]
        is_late |= module["type"].startswith("pylate.")
        if kind == "Pooling":
            file = folder / path / "config.json"
            mode = _pooling_mode(file)
            include_prompt = read(bool, read_json_object(file, "model", {}), "include_prompt", True, file=str(file))
        elif kind == "Dense":
            dense.append(_dense_layer(folder, path))
        elif kind == "Normalize":
            normalize = True
        elif kind == "SpladePooling":
            splade = _splade(folder / path / "config.json")
        elif kind not in _SILENT:
            raise ConfigError(f"{folder}/modules.json: modules of type {module['type']!r} are not known", "model")
    told = read_json_object(folder / FILE, "model", {})
    similarity = _similarity(told, f"{folder}/{FILE}")
    is_late |= similarity == "maxsim"
    return Chain(
        mode=mode,
        dense=tuple(dense),
        normalize=normalize or is_late,
        splade=splade,
        is_late=is_late,
        include_prompt=include_prompt,
        prompts=_prompts(folder),
        default_prompt=_default_prompt(folder),
        similarity=similarity,
        max_tokens=_max_tokens(folder),
    )


def _pooling_mode(file: Path) -> Mode:
    config = read_json_object(file, "model", {})
    found = [
        name.removeprefix("pooling_mode_")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and read(bool, config, name, False, file=str(file))
    ]
    found = found or [read(str, config, "pooling_mode", "mean", file=str(file))]
    if len(found) != 1 or found[0] not in POOLINGS:
        known = ", ".join(dict.fromkeys(POOLINGS.values()))
        raise ConfigError(f"{file}: pooling by {' and '.join(found)} is not known; by one of {known} is", "model")
    return POOLINGS[found[0]]


def _dense_layer(folder: Path, path: str) -> DenseLayer:
    if not path:
        raise ConfigError(f"{folder}/modules.json: a Dense module needs a path of its own, got ''", "model")
    file = str(folder / path / "config.json")
    if not Path(file).exists():
        raise ConfigError(f"{folder}/modules.json: path {path!r} holds no config.json", "model")
    config = read_json_object(Path(file), "model")
    if read(bool, config, "use_residual", False, file=file):
        raise ConfigError(f"{file}: use_residual=true is not supported", "model")
    act = read(str, config, "activation_function", "torch.nn.modules.activation.Tanh", file=file)
    return DenseLayer(
        folder=path,
        in_features=read_positive(config, "in_features", file=file),
        out_features=read_positive(config, "out_features", file=file),
        bias=read(bool, config, "bias", True, file=file),
        activation=act.rpartition(".")[2],
    )


def _splade(file: Path) -> Splade:
    config = read_json_object(file, "model", {})
    strategy = read(str, config, "pooling_strategy", "max", file=str(file))
    act = read(str, config, "activation_function", "relu", file=str(file))
    if strategy not in ("max", "sum") or act not in _SQUASHES:
        raise ConfigError(
            f"{file}: pooling_strategy={strategy!r} of activation_function={act!r} is not known; max and sum of "
            f"{' and '.join(_SQUASHES)} are",
            "model",
        )
    return Splade(mode="splade_max" if strategy == "max" else "splade_sum", squashes=_SQUASHES[act])


def _similarity(told: Mapping[str, Any], file: str) -> Similarity | None:
    name = read(str, told, "similarity_fn_name", "", file=file)
    if name and name.lower() not in _SIMILARITIES:
        raise ConfigError(
            f"{file}: similarity_fn_name must be one of {', '.join(_SIMILARITIES)}, got {name!r}", "model"
        )
    return _SIMILARITIES.get(name.lower())


def _prompts(folder: Path) -> tuple[tuple[str, str], ...]:
    file = folder / FILE
    found = read_section(read_json_object(file, "model", {}), "prompts", file=str(file))
    return tuple((kind, read(str, found, kind, "", file=f"{file}: prompts")) for kind in found)


def _default_prompt(folder: Path) -> str:
    file = folder / FILE
    told = read_json_object(file, "model", {})
    name = read(str, told, "default_prompt_name", "", file=str(file))
    if name and name not in read_section(told, "prompts", file=str(file)):
        raise ConfigError(f"{file}: default_prompt_name={name!r} is none of prompts", "model")
    return name


def _max_tokens(folder: Path) -> int | None:
    file = folder / "sentence_bert_config.json"
    config = read_json_object(file, "model", {})
    return None if config.get("max_seq_length") is None else read_positive(config, "max_seq_length", file=str(file))
