"""How a pooling model turns its states into a vector: from config.json and what stands beside it, as plain JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.config.generation import token_ids
from quire.config.late_interaction import LateInteraction, read_late
from quire.config.model import ModelConfig
from quire.config.model_info import ModelInfo
from quire.config.reading import read, read_positive, read_section
from quire.config.sentence_transformers import (
    POOLINGS,
    Chain,
    DenseLayer,
    Mode,
    Similarity,
    Splade,
    chain,
    read_modules,
)
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import read_json_object, shown
from quire.types.pooling import EMBED, SPARSE_EMBED, TOKEN_CLASSIFY, TOKEN_EMBED

Kind = Literal["embed", "classify"]
Activation = Literal["identity", "normalize", "sigmoid", "softmax"]
MODES = ("cls", "last", "mean", "max")
OPTIONS = (
    "pooling_type",
    "seq_pooling_type",
    "tok_pooling_type",
    "use_activation",
    "step_tag_id",
    "returned_token_ids",
)

_GENERATING = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|^ChatGLMModel)$")
_CLASSIFYING = re.compile(r"(For(Sequence|Token)Classification|ClassificationModel|For(Process)?RewardModel)$")
_EMBEDDING = re.compile(r"(Model|ForTextEncoding|EmbeddingModel|ForMaskedLM|ColBERT)$")
# What makes probabilities of logits, by the `problem_type` of config.json.
_PROBLEMS: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_OWN_MODES: dict[str, Mode] = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "last"}
_QWEN_STEP = 151651  # <extra_0>, behind every step that Qwen2.5-Math-PRM judges
_CLASS_MODES: dict[str, Mode] = {"cls": "cls", "bos": "cls", "mean": "mean", "late": "late", "last": "last"}


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
    default_prompt: str = ""  # the kind that sentence-transformers takes a text for if nobody says
    only_by_token: bool = False  # the vectors are of tokens, not of texts
    similarity: Similarity = "cosine"  # by which embeddings are compared; maxsim: those of tokens
    late: LateInteraction | None = None  # how texts are framed that are compared token by token
    # Weights of words: "vocabulary", the vector is one of them, or "tokens": a head beside the others makes a weight of
    # each token.
    lexical: Literal["", "vocabulary", "tokens"] = ""
    squashes: int = 1  # times that logarithms are taken of these
    unweighted: tuple[int, ...] = ()  # tokens that have no such weight; the first has no vector by token either
    step_token: int | None = None  # the classes of tokens are of those alone
    returned_tokens: tuple[int, ...] = ()  # the classes are the logits of these
    include_prompt: bool = True  # what stands before a text counts in its vector

    @property
    def tasks(self) -> tuple[str, ...]:
        """What can be asked, the usual first."""
        by_token = f"token_{self.kind}"
        if self.only_by_token:
            return (by_token,)
        if self.lexical == "vocabulary":
            return EMBED, SPARSE_EMBED
        if self.lexical == "tokens":
            return EMBED, TOKEN_EMBED, TOKEN_CLASSIFY, SPARSE_EMBED
        return self.kind, by_token


def resolve_pooler(model: ModelConfig, info: ModelInfo) -> PoolerConfig | None:
    """What `runner` and `convert` mean for this model; None: it generates.

    Raises ConfigError for pooling that is not known.
    """
    folder, text = Path(info.path), info.hf_config
    modules = read_modules(folder)
    if not _pools(model, info.architecture, modules):
        return None
    options = _options(model.pooler_config)
    label_tokens = _label_tokens(info, text, modules)
    returned = tuple(token_ids(options, "returned_token_ids", info.vocab_size, "pooler_config"))
    kind: Kind = "classify" if _CLASSIFYING.search(info.architecture) or label_tokens or returned else "embed"
    if model.convert in ("embed", "classify") and not (label_tokens or returned):
        kind = "classify" if model.convert == "classify" else "embed"
    told = chain(folder, modules)
    if kind == "classify":
        return _classifying(info, options, told, label_tokens, returned)
    late = read_late(folder, is_colbert=told.is_late or "ColBERT" in info.architecture)
    splade = told.splade or (Splade() if "Splade" in info.architecture else None)
    by_words = "tokens" if info.architecture == "BgeM3EmbeddingModel" else ""
    mode = _mode(options) or (splade.mode if splade else told.mode) or ("cls" if by_words else _own_mode(text))
    activation: Activation = "normalize" if told.normalize and not splade else "identity"
    if options.get("use_activation") is not None:
        activation = "normalize" if options["use_activation"] else "identity"
    similarity = "maxsim" if late else told.similarity or ("dot" if splade else "cosine")
    size = told.dense[-1].out_features if told.dense else late.size if late and late.size else text["hidden_size"]
    return PoolerConfig(
        kind="embed",
        mode=mode,
        activation=activation,
        size=info.vocab_size if splade else size,
        dense=told.dense,
        prompts=told.prompts,
        default_prompt=told.default_prompt,
        max_tokens=told.max_tokens,
        is_matryoshka=read(bool, text, "is_matryoshka", False) or bool(text.get("matryoshka_dimensions")),
        matryoshka_dimensions=_matryoshka_dimensions(text),
        only_by_token=late is not None,
        pairs_have_types=read(int, text, "type_vocab_size", 0) > 1,
        similarity=similarity,
        late=late,
        lexical="vocabulary" if splade else "tokens" if by_words else "",
        squashes=splade.squashes if splade else 1,
        unweighted=(_one_id(info, "bos_token_id", 0), _one_id(info, "eos_token_id", 2)) if by_words else (),
        include_prompt=told.include_prompt,
    )


def _classifying(
    info: ModelInfo,
    options: Mapping[str, Any],
    told: Chain,
    label_tokens: tuple[int, int | None] | None,
    returned: tuple[int, ...],
) -> PoolerConfig:
    folder, text, architecture = Path(info.path), info.hf_config, info.architecture
    if "Bidirectional" in architecture and text.get("temperature") not in (None, 1):  # of the logits, in such models
        raise ConfigError(f"config.json: temperature={shown(text['temperature'])} is not supported", "temperature")
    is_reward, is_process = "Reward" in architecture, "ProcessReward" in architecture
    labels: tuple[str, ...] = tuple(f"TOKEN_{token}" for token in returned) or _labels(text)
    if label_tokens is not None or (is_reward and not is_process):
        labels = ("LABEL_0",)
    activation = _class_activation(folder, text, len(labels))
    if is_reward:
        activation = "softmax" if is_process else "identity"
    if options.get("use_activation") is not None:
        wanted = options["use_activation"]
        activation = (
            "identity" if not wanted else _usual_activation(len(labels)) if activation == "identity" else activation
        )
    step = next(iter(token_ids(options, "step_tag_id", info.vocab_size, "pooler_config")), None)
    if step is None and is_process:
        step = _one_id(info, "step_tag_id", _QWEN_STEP)
    return PoolerConfig(
        kind="classify",
        mode=_mode(options) or told.mode or (None if label_tokens else _class_mode(text)),
        activation=activation,
        size=len(labels),
        labels=labels,
        prompts=told.prompts,
        default_prompt=told.default_prompt,
        max_tokens=told.max_tokens,
        label_tokens=label_tokens,
        only_by_token=architecture.endswith("ForTokenClassification") or step is not None,
        pairs_have_types=read(int, text, "type_vocab_size", 0) > 1,
        step_token=step,
        returned_tokens=returned,
    )


def _options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """`pooler_config`, checked."""
    if unknown := set(given) - set(OPTIONS):
        raise ConfigError(
            f"pooler_config has the unknown key {sorted(unknown)[0]!r}; it may hold {', '.join(OPTIONS)}",
            "pooler_config",
        )
    by_token = str(given.get("tok_pooling_type") or "ALL").upper()
    if by_token not in ("ALL", "STEP") or (by_token == "STEP" and given.get("step_tag_id") is None):
        raise ConfigError(
            f"tok_pooling_type must be ALL, or STEP with a step_tag_id, got {given['tok_pooling_type']!r}",
            "pooler_config",
        )
    return given


def _mode(options: Mapping[str, Any]) -> Mode | None:
    """That was asked for."""
    asked = options.get("seq_pooling_type") or options.get("pooling_type")
    if asked is None or (str(asked).upper() == "STEP" and options.get("step_tag_id") is not None):
        return None
    if str(asked).lower() not in MODES:
        raise ConfigError(f"pooling_type must be one of {', '.join(MODES).upper()}, got {asked!r}", "pooler_config")
    return POOLINGS[str(asked).lower()]


def _own_mode(config: Mapping[str, Any]) -> Mode | None:
    """`pooling` of decoders that were made to look both ways."""
    told = read(str, config, "pooling", "")
    if told and told not in _OWN_MODES:
        raise ConfigError(f"config.json: pooling must be one of {', '.join(_OWN_MODES)}, got {told!r}", "pooling")
    return _OWN_MODES.get(told)


def _one_id(info: ModelInfo, key: str, usual: int) -> int:
    return next(iter(token_ids(info.hf_config, key, info.vocab_size, "config.json")), usual)


def _pools(model: ModelConfig, architecture: str, modules: list[dict[str, Any]]) -> bool:
    if model.runner != "auto":
        if model.runner == "generate" and model.convert in ("embed", "classify"):
            raise ConfigError(f"convert={model.convert} needs runner=pooling, got runner=generate", "convert")
        return model.runner == "pooling"
    if model.convert in ("embed", "classify") or modules:
        return True
    generates = _GENERATING.search(architecture)
    return not generates and bool(_CLASSIFYING.search(architecture) or _EMBEDDING.search(architecture))


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
    told = read(str, config, "classifier_pooling", "") or read(str, config, "pooling", "").replace("avg", "mean")
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
