"""The formats that a model writes its calls and its reasoning in: named by options, or found in its chat template."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quire.config.replies import ReplyConfig
from quire.config.resolve import Resolved
from quire.foundation.errors import ConfigError
from quire.foundation.log import get_logger
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.parsers.base import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat
from quire.parsers.detect import detect_reasoning_format, detect_tool_format

log = get_logger(__name__)

AUTO, NONE = "auto", ("none", "")


@dataclass(frozen=True, slots=True)
class Formats:
    """Of one model, found once."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    start: tuple[int, ...] = ()  # token ids of the marker that reasoning begins with
    end: tuple[int, ...] = ()  # … of the one that ends it
    end_seam: int = 0  # after so many tokens of `end` others may stand before the rest
    end_before_calls: tuple[int, ...] = ()  # … if a call follows
    special_reasoning: bool = False  # these markers are special tokens, which the text must keep


def find_formats(resolved: Resolved, tokenizer: Tokenizer | None) -> Formats:
    """Raises ConfigError for an unknown name (with the known ones) or a plugin file that cannot be used."""
    config = resolved.config.replies
    for name in ("tool_parser_plugin", "reasoning_parser_plugin"):
        if file := getattr(config, name):
            _load_plugin(Path(file).expanduser(), name)
    tools, reasoning = _names(config, resolved, tokenizer)
    tool_format = None if tools is None else TOOL_FORMATS.get(tools, "tool_call_parser")
    if reasoning is None or tokenizer is None:
        return Formats(tool_format)
    reasoning_format: ReasoningFormat = REASONING_FORMATS.get(reasoning, "reasoning_parser")
    start, end, end_before_calls = (
        tuple(tokenizer.encode(marker, add_special_tokens=False))
        for marker in (reasoning_format.start, reasoning_format.end, reasoning_format.end_before_calls)
    )
    head = tuple(tokenizer.encode(getattr(reasoning_format, "end_head", ""), add_special_tokens=False))
    return Formats(
        tools=tool_format,
        reasoning=reasoning_format,
        start=start,
        end=end,
        end_seam=len(head) if head == end[: len(head)] else 0,
        end_before_calls=end_before_calls,
        special_reasoning=_any_special(tokenizer, (*start, *end)),
    )


def _names(config: ReplyConfig, resolved: Resolved, tokenizer: Tokenizer | None) -> tuple[str | None, str | None]:
    """Of the tool format and of the reasoning format."""
    template = "" if tokenizer is None or tokenizer.template is None else "\n".join(tokenizer.template.sources.values())
    model_config = resolved.info.hf_config
    models = [str(model_config.get("model_type", "")), *map(str, model_config.get("architectures") or ())]
    names: list[str | None] = []
    for what, asked, detect in (
        ("tool calls", config.tool_call_parser, detect_tool_format),
        ("reasoning", config.reasoning_parser, detect_reasoning_format),
    ):
        if asked in NONE:
            names.append(None)
        elif asked != AUTO:
            names.append(asked)
        else:
            found = detect(template, models)
            names.append(found)
            if found is not None:
                log.info("format of %s: %s, told by the chat template", what, found)
    return names[0], names[1]


def _any_special(tokenizer: Tokenizer, ids: Iterable[int]) -> bool:
    return not set(ids).isdisjoint(tokenizer.all_special_ids)


@cache
def _load_plugin(file: Path, option: str) -> None:
    """Run a file of the operator's, once a process."""
    name = f"quire_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"{option} {str(file)!r} is not a Python file", option)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{option} {str(file)!r} failed: {type(error).__name__}: {error}", option) from error
