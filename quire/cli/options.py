"""Command lines and YAML files from the config dataclasses: a field is a flag, its docstring is the help."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro

from quire.config.engine import SECTIONS, EngineConfig
from quire.config.options import check_option
from quire.config.unsupported import SHORT, refusal
from quire.foundation.errors import ConfigError

ENGINE_SECTIONS = tuple(SECTIONS.values())
ALIASES = {"base_url": "url"}  # what other tools call an option
FLAG = re.compile(r"--[A-Za-z][\w.-]*")
STRAY = "Unrecognized options: "
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse(
    command: str,
    about: str,
    arguments: Sequence[str],
    sections: Sequence[type],
    *,
    positional: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The values of all fields of `sections` by name: command line, else the `--config` file, else the default.

    `positional` names fields that are given without a flag. Prints help and exits (0) if that is asked for; raises
    ConfigError for a flag, a value or a `--config` file that cannot be.
    """
    merged = {**(defaults or {})}
    path, rest = _take_config(list(arguments))
    fields = {field.name: (section, field) for section in sections for field in dataclasses.fields(section)}
    if path is not None:
        merged |= _read_yaml(path, fields)
    rest = _switched([_known(argument, fields) for argument in rest], fields)
    for name in reversed(positional):
        rest = _put_first(name, rest)
    dotted, rest = _take_dotted(rest, fields)
    rest = _lists(rest, fields)
    flat = dataclasses.make_dataclass(
        "Options", [_flag(section, field, field.name in positional, merged) for section, field in fields.values()]
    )
    parsed: Any = _read_flags(flat, command, about, rest)
    values = {name: getattr(parsed, name) for name in fields}
    if positional and not any(values[name] for name in positional):
        _check_lists({name: values[name] for name in fields if values[name] != merged.get(name)}, positional[0])
    return values | {name: _laid_over(values[name], own) for name, own in dotted.items()}


def _read_flags(flat: type, command: str, about: str, arguments: Sequence[str]) -> Any:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                flat, prog=f"quire {command}", description=about, args=arguments, config=(tyro.conf.OmitArgPrefixes,)
            )
    except SystemExit as exit_:
        if not exit_.code:
            raise
        text = _out_of_box(said.getvalue())
    if text.startswith(STRAY):  # flags that nobody knows are told before
        stray = text.removeprefix(STRAY).splitlines()[0]
        raise ConfigError(f"quire {command}: no option takes this: {stray}", code="unknown-option") from None
    raise ConfigError(f"quire {command}: {text}", code="bad-value") from None


def _out_of_box(text: str) -> str:
    """What stands in the frame around an error of tyro, as lines; the last part says where help is."""
    parts: list[list[str]] = [[]]
    for line in text.splitlines()[1:]:  # below the title
        inner = line.strip().strip("│╰╯|+").strip()
        if inner and set(inner) <= set("─-"):
            parts.append([])
        elif inner:
            parts[-1].append(inner)
    told = [" ".join(part) for part in parts if part and not part[0].startswith("For full helptext")]
    return "\n  ".join(told)


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """The engine's part of parsed values."""
    names = {field.name for section in ENGINE_SECTIONS for field in dataclasses.fields(section)}
    return EngineConfig.from_flat(**{name: value for name, value in values.items() if name in names})


def section_of(section: type, values: Mapping[str, Any]) -> Any:
    """One section's part of parsed values."""
    return section(**{field.name: values[field.name] for field in dataclasses.fields(section)})


def field_docs(section: type) -> dict[str, str]:
    """The string that follows each field of a dataclass in its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[field.target.id] = str(text.value.value)  # type: ignore[union-attr]
    return docs


def parse_size(text: str) -> int:
    """A whole number, perhaps with a unit: 4096, 4k (4000), 4K (4096), 1.5G. Raises ValueError."""
    match = re.fullmatch(r"([+-]?\d[\d_]*(?:\.\d+)?)([kmgtKMGT]?)", text.strip())
    number = float(match[1].replace("_", "")) * UNITS.get(match[2], 1) if match else 0.5
    if number != int(number):
        raise ValueError(f"{text!r} is not a whole number (4096, 4k = 4000, 4K = 4096)")
    return int(number) if not match or match[2] or "." in match[1] else int(match[1])


def _take_config(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """Split `--config FILE` (or `--config=FILE`) from the rest."""
    found: list[str] = []
    rest: list[str] = []
    items = iter(arguments)
    for item in items:
        if item == "--config":
            found.append(next(items, ""))
        elif item.startswith("--config="):
            found.append(item.removeprefix("--config="))
        else:
            rest.append(item)
    if len(found) > 1:
        raise ConfigError("--config may be given once", "config")
    return (Path(found[0]) if found else None), rest


def _take_dotted(
    arguments: list[str], fields: Mapping[str, tuple[type, dataclasses.Field[Any]]]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Split `--option.key VALUE` (or `--option.key=VALUE`), one key of an option that is a JSON object, from the rest.

    VALUE is JSON, or text if it is none; key.inner is a key of an object in it, and key+ appends to a list. Raises
    ConfigError for a key without a value, or inside of what is no object.
    """
    found: dict[str, dict[str, Any]] = {}
    rest: list[str] = []
    items = iter(arguments)
    for item in items:
        flag, equals, value = item.partition("=")
        option, dot, key = flag.removeprefix("--").partition(".")
        name = option.replace("-", "_")
        is_object = name in fields and typing.get_origin(typing.get_type_hints(fields[name][0])[name]) is dict
        if not (item.startswith("--") and dot and key and is_object):
            rest.append(item)
            continue
        text = value if equals else next(items, None)
        if text is None:
            raise ConfigError(f"{flag} needs a value", name)
        try:
            given = msgspec.json.decode(text.encode())
        except (msgspec.MsgspecError, UnicodeEncodeError):
            given = text
        *outer, last = key.removesuffix("+").split(".")
        own: Any = found.setdefault(name, {})
        try:
            for part in outer:
                own = own.setdefault(part, {})
            if key.endswith("+"):
                own.setdefault(last, []).append(given)
            else:
                own[last] = given
        except (AttributeError, TypeError):
            raise ConfigError(f"{flag} lies inside of what is something else already", name) from None
    return found, rest


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Objects that both have are one; of all else `above` wins."""
    both = {key: _laid_over(below[key], value) for key, value in above.items() if _is_object(value, below.get(key))}
    return {**below, **above, **both}


def _is_object(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def _read_yaml(path: Path, fields: Mapping[str, tuple[type, dataclasses.Field[Any]]]) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}", "config") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config file {str(path)!r} must hold a mapping of options to values", "config")
    values = {}
    for key, value in data.items():
        name = _own_name(str(key).replace("-", "_"), fields)
        if name not in fields and (why := refusal(name)) is not None:
            raise ConfigError(f"{path}: {why}", name, code="foreign-option")
        if name not in fields:
            hint = f"; did you mean {near!r}?" if (near := _near(name, fields)) else ""
            raise ConfigError(f"{path}: unknown option {key!r}{hint}", name, code="unknown-option")
        section, _ = fields[name]
        wanted = typing.get_type_hints(section)[name]
        if isinstance(value, str) and _is_int(wanted):
            try:
                value = parse_size(value)
            except ValueError as error:
                raise ConfigError(f"{path}: {name}: {error}", name) from None
        try:
            values[name] = check_option(name, value, wanted)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}", name) from None
        if name == "served_model_name" and not values[name]:
            raise ConfigError(f"{path}: {name} needs a name", name)
    return values


def _flag(
    section: type, field: dataclasses.Field[Any], positional: bool, merged: Mapping[str, Any]
) -> tuple[str, Any, Any]:
    """One field as `make_dataclass` wants it, with tyro's view of its type, help and default."""
    wanted = typing.get_type_hints(section)[field.name]
    marks: list[Any] = [tyro.conf.arg(help=field_docs(section).get(field.name, ""))]
    if positional:
        marks.append(tyro.conf.Positional)
    if typing.get_origin(wanted) is dict:
        marks.append(_json_object())
    elif _is_int(wanted):
        marks.append(_whole_number(optional=wanted is not int))
    default: Any = field.default
    if field.name in merged:
        default = merged[field.name]
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if isinstance(default, list | dict):
        return field.name, Annotated[(wanted, *marks)], dataclasses.field(default_factory=lambda: default)
    return field.name, Annotated[(wanted, *marks)], dataclasses.field(default=default)


def _is_int(wanted: Any) -> bool:
    return wanted is int or set(typing.get_args(wanted)) == {int, types.NoneType}


def _whole_number(*, optional: bool) -> Any:
    def read(arguments: list[str]) -> int | None:
        if optional and arguments[0].lower() in ("none", "auto"):
            return None
        return parse_size(arguments[0])

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT|auto" if optional else "INT",
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: ["auto" if value is None else str(value)],
    )


def _json_object() -> Any:
    def read(arguments: list[str]) -> dict[str, Any]:
        try:
            return msgspec.json.decode(arguments[0].encode(), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ValueError(f"{arguments[0]!r} is not a JSON object: {error}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [msgspec.json.encode(value).decode()],
    )


def _put_first(name: str, arguments: list[str]) -> list[str]:
    """`--model M` is M, the first argument, for who gives by name what needs none."""
    flag = "--" + name.replace("_", "-")
    for position, argument in enumerate(arguments):
        own, equals, value = argument.partition("=")
        if own == flag:
            following = [value] if equals else arguments[position + 1 : position + 2]
            if not following or not following[0] or following[0].startswith("-"):
                raise ConfigError(f"{flag} needs a value", code="bad-value")
            return [*following, *arguments[:position], *arguments[position + (1 if equals else 2) :]]
    return arguments


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return near[0] if near else ""


def _own_name(name: str, fields: Mapping[str, Any]) -> str:
    return ALIASES[name] if name not in fields and ALIASES.get(name) in fields else name


def _known(argument: str, fields: Mapping[str, Any]) -> str:
    """A flag as it is written here: `--max_model_len=…` is `--max-model-len=…`, and an alias is what it stands for.

    Raises ConfigError for one that others have and we do not, and for one that nobody has.
    """
    flag, equals, value = argument.partition("=")
    option, dot, key = flag.removeprefix("--").partition(".")
    if option in SHORT:
        if SHORT[option] not in fields:
            instead = refusal(SHORT[option]) or f"{SHORT[option]} is no option here"
            raise ConfigError(f"{option}: {instead}", SHORT[option], code="foreign-option")
        return "--" + SHORT[option].replace("_", "-") + dot + key + equals + value
    if not FLAG.fullmatch(flag):
        return argument
    name = _own_name(option.replace("-", "_"), fields)
    if name not in fields and name.removeprefix("no_") not in fields:
        why = refusal(name) or refusal(name.removeprefix("no_"))
        if why is not None:
            raise ConfigError(why, name, code="foreign-option")
        if name != "help":
            near = _near(name, fields)
            hint = f"; did you mean --{near.replace('_', '-')}?" if near else ""
            raise ConfigError(f"there is no option --{option}{hint}", name, code="unknown-option")
    return "--" + name.replace("_", "-") + dot + key + equals + value


def _switched(arguments: Sequence[str], fields: Mapping[str, tuple[type, dataclasses.Field[Any]]]) -> list[str]:
    """`--x` and `--no-x`, of a switch that may also be left open, with the value that they stand for."""
    found: list[str] = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        own = name if name in fields else name.removeprefix("no_")
        if not flag.startswith("--") or own not in fields or not _is_switch(fields[own][0], own):
            found.append(argument)
        elif own != name and not equals:
            found += ["--" + own.replace("_", "-"), "False"]
        elif equals:
            found += [flag, value.capitalize()]
        else:
            found += [flag] if following.capitalize() in ("True", "False", "None") else [flag, "True"]
    return found


def _is_switch(section: type, name: str) -> bool:
    """Whether it is on, off or left open."""
    return bool(typing.get_type_hints(section)[name] == bool | None)


def _lists(arguments: Sequence[str], fields: Mapping[str, tuple[type, dataclasses.Field[Any]]]) -> list[str]:
    """A list that is written in JSON, as others take it, as words.

    Raises ConfigError for a list that is named and not given, as it would be taken for the default, and for one that is
    named twice, as what came first would be lost.
    """
    found: list[str] = []
    given: dict[str, list[str]] = {}
    name = ""  # of the list whose values come
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            words = _json_words(argument) if name else [argument]
            given.get(name, []).extend(words)
        else:
            own = flag.removeprefix("--").replace("-", "_")
            name = own if own in fields and _is_list(fields[own][0], own) else ""
            if name in given:
                raise ConfigError(f"{flag} is given twice; its values are given together: {flag} A B", name)
            words = [argument]
            if name:
                given[name] = _json_words(value) if equals else []
                words = [argument] if given[name] == [value] else [flag, *given[name]]
        found += words
    for name, values in given.items():
        if not any(value.strip() for value in values):
            raise ConfigError(f"--{name.replace('_', '-')} needs a value", name)
    return found


def _check_lists(values: Mapping[str, Any], missing: str) -> None:
    """Raises ConfigError if a list has taken what was meant as the model, which then is the demo: a key, say."""
    for name, words in values.items():
        last = words[-1] if isinstance(words, list) and len(words) > 1 else None
        if isinstance(last, str) and "/" in last and not any(sign in last for sign in ("://", "=", "{")):
            raise ConfigError(
                f"--{name.replace('_', '-')} takes all words up to the next option, {last!r} too; give the {missing} "
                f"before the options, or with --{missing}",
                name,
                code="bad-value",
            )


def _is_list(section: type, name: str) -> bool:
    return typing.get_origin(typing.get_type_hints(section)[name]) is list


def _json_words(text: str) -> list[str]:
    if not text.startswith("["):
        return [text]
    try:
        return [str(item) for item in msgspec.json.decode(text.encode(), type=list[str | int])]
    except msgspec.MsgspecError:
        return [text]
