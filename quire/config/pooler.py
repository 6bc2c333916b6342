"""How a pooling model turns its states into a vector: from config.json and sentence-transformers' files, as plain JSON.

sentence-transformers describes a model as a chain of modules in modules.json (Transformer, Pooling, Dense, Normalize),
each with a folder of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.config.generation import token_ids
from quire.config.model import ModelConfig
from quire.config.model_info import ModelInfo
from quire.config.reading import read, read_positive, read_section
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import read_json, read_json_object, shown

Kind = Literal["embed", "classify"]
# weighted: a mean in which later tokens count for more; root: sums divided by the root of the number of tokens. Of what
# the head makes of every token: late, their mean; splade_max and splade_sum, in logarithms.
Mode = Literal["cls", "last", "mean", "max", "weighted", "root", "late", "splade_max", "splade_sum"]
Activation = Literal["identity", "normalize", "sigmoid", "softmax"]
MODES = ("cls", "last", "mean", "max")

_GENERATING = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|^ChatGLMModel)$")
_CLASSIFYING = re.compile(r"(For(Sequence|Token)Classification|ClassificationModel)$")
_EMBEDDING = re.compile(r"(Model|ForTextEncoding|EmbeddingModel|ForMaskedLM)$")
# What makes probabilities of logits, by the `problem_type` of config.json.
_PROBLEMS: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
# sentence-transformers' word for each mode, in either spelling of its Pooling config.
_MODES: dict[str, Mode] = {
    "cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean",
    "max": "max", "max_tokens": "max", "lasttoken": "last", "last": "last", "weightedmean": "weighted",
    "weightedmean_tokens": "weighted", "mean_sqrt_len_tokens": "root", "mean_sqrt_len": "root",
}  # fmt: skip
_CLASS_MODES: dict[str, Mode] = {"cls": "cls", "bos": "cls", "mean": "mean", "late": "late"}


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """A layer behind the pooling, in a folder of its own."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str  # its class in torch.nn: Identity, Tanh …


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    kind: Kind
    mode: Mode | None  # None: as the family does it (encoders: the first token, decoders: the last)
    activation: Activation  # of one vector; by default, requests may do without
    size: int  # of one vector: dimensions or classes
    labels: tuple[str, ...] = ()  # of the classes
    dense: tuple[DenseLayer, ...] = ()
    max_tokens: int | None = None  # of a prompt, that the vectors were trained for
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()  # that may be asked for; none given: all
    # The vector is one number: by how much the logit of the first of these tokens exceeds that of the second (0: none)
    # at the place of the next token.
    label_tokens: tuple[int, int | None] | None = None
    pairs_have_types: bool = False  # the second text of a pair has token type 1

    prompts: tuple[tuple[str, str], ...] = ()  # what texts of a kind should begin with: (kind, words)
    only_by_token: bool = False  # the classes are of tokens, not of texts

    @property
    def tasks(self) -> tuple[str, ...]:
        """What can be asked, the usual first."""
        by_token = f"token_{self.kind}"
        return (by_token,) if self.only_by_token else (self.kind, by_token)


def resolve_pooler(model: ModelConfig, info: ModelInfo) -> PoolerConfig | None:
    """What `runner` and `convert` mean for this model; None: it generates.

    Raises ConfigError for pooling that is not known.
    """
    modules = _read_modules(Path(info.path))
    if not _pools(model, info.architecture, modules):
        return None
    kind: Kind = "classify" if _CLASSIFYING.search(info.architecture) else "embed"
    if model.convert in ("embed", "classify"):
        kind = "classify" if model.convert == "classify" else "embed"
    text = info.hf_config
    label_tokens = _label_tokens(info, text, modules)
    if label_tokens is not None:
        kind = "classify"
    pooling, dense, normalize = _of_sentence_transformers(Path(info.path), modules)
    options = model.pooler_config
    unknown = set(options) - {"pooling_type", "seq_pooling_type", "use_activation"}
    if unknown:
        raise ConfigError(
            f"pooler_config has the unknown key {sorted(unknown)[0]!r}; it may hold pooling_type and use_activation",
            "pooler_config",
        )
    asked = options.get("seq_pooling_type") or options.get("pooling_type")
    if asked is not None and str(asked).lower() not in MODES:
        raise ConfigError(f"pooling_type must be one of {', '.join(MODES).upper()}, got {asked!r}", "pooler_config")
    mode: Mode | None = _MODES[str(asked).lower()] if asked else pooling
    if mode is None and kind == "classify" and label_tokens is None:
        mode = _class_mode(text)
    labels = _labels(text) if kind == "classify" and label_tokens is None else ("LABEL_0",)
    activation: Activation = "normalize" if normalize else "identity"
    if kind == "classify":
        activation = _class_activation(Path(info.path), text, len(labels))
    if options.get("use_activation") is False:
        activation = "identity"
    elif options.get("use_activation") and activation == "identity":
        activation = "normalize" if kind == "embed" else _usual_activation(len(labels))
    return PoolerConfig(
        kind=kind,
        mode=mode,
        activation=activation,
        size=len(labels) if kind == "classify" else dense[-1].out_features if dense else text["hidden_size"],
        labels=labels if kind == "classify" else (),
        dense=dense if kind == "embed" else (),
        prompts=_prompts(Path(info.path)),
        max_tokens=_max_tokens(Path(info.path)),
        is_matryoshka=read(bool, text, "is_matryoshka", False) or bool(text.get("matryoshka_dimensions")),
        matryoshka_dimensions=_matryoshka_dimensions(text),
        label_tokens=label_tokens,
        only_by_token=kind == "classify" and info.architecture.endswith("ForTokenClassification"),
        pairs_have_types=read(int, text, "type_vocab_size", 0) > 1,
    )


def _pools(model: ModelConfig, architecture: str, modules: list[dict[str, Any]]) -> bool:
    if model.runner != "auto":
        if model.runner == "generate" and model.convert in ("embed", "classify"):
            raise ConfigError(f"convert={model.convert} needs runner=pooling, got runner=generate", "convert")
        return model.runner == "pooling"
    if model.convert in ("embed", "classify") or modules:
        return True
    generates = _GENERATING.search(architecture)
    return not generates and bool(_CLASSIFYING.search(architecture) or _EMBEDDING.search(architecture))


# -- sentence-transformers ---------------------------------------------------------------------------------------


def _read_modules(folder: Path) -> list[dict[str, Any]]:
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


def _of_sentence_transformers(
    folder: Path, modules: list[dict[str, Any]]
) -> tuple[Mode | None, tuple[DenseLayer, ...], bool]:
    """Pooling mode, dense layers and whether vectors are normalised; without modules they are."""
    if not modules:
        return None, (), True
    mode: Mode | None = None
    dense, normalize = [], False
    for module in modules:
        kind, path = module["type"].rpartition(".")[2], module["path"]
        if kind == "Pooling":
            mode = _pooling_mode(folder / path / "config.json")
        elif kind == "Dense":
            dense.append(_dense_layer(folder, path))
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "LogitScore"):
            raise ConfigError(f"{folder}/modules.json: modules of type {module['type']!r} are not known", "model")
    return mode, tuple(dense), normalize


def _pooling_mode(file: Path) -> Mode:
    config = read_json_object(file, "model", {})
    found = [
        name.removeprefix("pooling_mode_")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and read(bool, config, name, False, file=str(file))
    ]
    found = found or [read(str, config, "pooling_mode", "mean", file=str(file))]
    if len(found) != 1 or found[0] not in _MODES:
        raise ConfigError(
            f"{file}: pooling by {' and '.join(found)} is not known; by one of {', '.join(MODES)} is", "model"
        )
    return _MODES[found[0]]


def _dense_layer(folder: Path, path: str) -> DenseLayer:
    if not path:
        raise ConfigError(f"{folder}/modules.json: a Dense module needs a path of its own, got ''", "model")
    file = str(folder / path / "config.json")
    if not Path(file).exists():
        raise ConfigError(f"{folder}/modules.json: path {path!r} holds no config.json", "model")
    config = read_json_object(Path(file), "model")
    return DenseLayer(
        folder=path,
        in_features=read_positive(config, "in_features", file=file),
        out_features=read_positive(config, "out_features", file=file),
        bias=read(bool, config, "bias", True, file=file),
        activation=read(str, config, "activation_function", "torch.nn.modules.activation.Tanh", file=file).rpartition(
            "."
        )[2],
    )


def _prompts(folder: Path) -> tuple[tuple[str, str], ...]:
    file = folder / "config_sentence_transformers.json"
    found = read_section(read_json_object(file, "model", {}), "prompts", file=str(file))
    return tuple((kind, read(str, found, kind, "", file=f"{file}: prompts")) for kind in found)


def _max_tokens(folder: Path) -> int | None:
    file = folder / "sentence_bert_config.json"
    config = read_json_object(file, "model", {})
    return None if config.get("max_seq_length") is None else read_positive(config, "max_seq_length", file=str(file))


# -- classes -----------------------------------------------------------------------------------------------------


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Of the classes, in order; two if the config does not say, as transformers has it."""
    names = read_section(config, "id2label")
    if any(not re.fullmatch(r"\d{1,9}", key) for key in names):
        raise ConfigError(f"config.json: id2label must have numbers as keys, got {shown(list(names))}", "id2label")
    if names:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    return tuple(f"LABEL_{i}" for i in range(read_positive(config, "num_labels", 2)))


def _class_mode(config: Mapping[str, Any]) -> Mode | None:
    """Of encoders whose config.json says what their classes are made of."""
    told = read(str, config, "classifier_pooling", "")
    if told and told not in _CLASS_MODES:
        raise ConfigError(
            f"config.json: classifier_pooling must be one of {', '.join(_CLASS_MODES)}, got {told!r}",
            "classifier_pooling",
        )
    return _CLASS_MODES.get(told)


def _class_activation(folder: Path, config: Mapping[str, Any], num_labels: int) -> Activation:
    """What makes probabilities (or a score) of the last layer's numbers: the checkpoint's word for it, or the usual."""
    file = folder / "config_sentence_transformers.json"
    told = read(str, read_json_object(file, "model", {}), "activation_fn", "", file=str(file))
    told = told or read(str, read_section(config, "sentence_transformers"), "activation_fn", "")
    told = told or read(str, config, "sbert_ce_default_activation_function", "")
    word = (told or read(str, config, "function_to_apply", "")).rpartition(".")[2].lower()
    if word in ("identity", "none"):
        return "identity"
    if word in ("sigmoid", "softmax"):
        return "sigmoid" if word == "sigmoid" else "softmax"
    if word:
        raise ConfigError(
            f"{folder}: the classes' activation {word!r} (activation_fn of {file.name}, or of config.json) is not "
            "known; identity, sigmoid and softmax are",
            "model",
        )
    problem = read(str, config, "problem_type", "")
    if problem and problem not in _PROBLEMS:
        known = ", ".join(_PROBLEMS)
        raise ConfigError(f"config.json: problem_type must be one of {known}, got {problem!r}", "problem_type")
    return _PROBLEMS[problem] if problem else _usual_activation(num_labels)


def _usual_activation(num_labels: int) -> Activation:
    return "sigmoid" if num_labels == 1 else "softmax"


def _label_tokens(
    info: ModelInfo, config: Mapping[str, Any], modules: list[dict[str, Any]]
) -> tuple[int, int | None] | None:
    """The tokens (yes, no) whose logits are the score of a generating model that reranks."""
    folder = Path(info.path)
    for module in modules:
        if module["type"].endswith("LogitScore"):
            file = folder / module["path"] / "config.json"
            told, size = read_json_object(file, "model", {}), info.vocab_size
            yes, no = (token_ids(told, key, size, str(file)) for key in ("true_token_id", "false_token_id"))
            if len(yes) != 1 or len(no) > 1:
                raise ConfigError(
                    f"{file}: true_token_id must be one token id, and false_token_id one or none", "model"
                )
            return yes[0], no[0] if no else None
    tokens = config.get("classifier_from_token")
    if tokens is None:
        return None
    if not isinstance(tokens, list) or len(tokens) != 2:
        raise ConfigError(f"classifier_from_token must hold 2 tokens (no, yes), got {tokens!r}", "hf_overrides")
    vocabulary: Mapping[str, Any] = {}
    if any(isinstance(token, str) for token in tokens):
        file = folder / "tokenizer.json"
        model = read_section(read_json_object(file, "model", {}), "model", file=str(file))
        vocabulary = read_section(model, "vocab", file=f"{file}: model")
    found = {"no": tokens[0], "yes": tokens[1]}
    for answer, token in found.items():
        found[answer] = token if not isinstance(token, str) else vocabulary.get(token)
        if not token_ids(found, answer, info.vocab_size, "classifier_from_token"):
            raise ConfigError(f"classifier_from_token: {tokens!r} are not both tokens of the model", "hf_overrides")
    return found["yes"], found["no"]


def _matryoshka_dimensions(config: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = config.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list):
        raise ConfigError(f"config.json: matryoshka_dimensions must be a list, got {shown(sizes)}")
    return tuple(read_positive({"matryoshka_dimensions": size}, "matryoshka_dimensions") for size in sizes)
