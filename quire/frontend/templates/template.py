"""Chat templates: Jinja as checkpoints expect it, in a sandbox with limits.

The sandbox forbids private attributes and changing its inputs. The limits (`templates/limits.py`) stop a template that
would run or grow without end.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from quire.foundation.errors import ConfigError, InputError
from quire.frontend.templates import limits as template_limits
from quire.frontend.templates.message_forms import message_forms

MAX_SOURCE_CHARS = 1_000_000
MAX_REASON_CHARS = 500  # of what a template says to refuse its input
_METERED = "_quire_metered"  # filters
_CONCAT = "_quire_concat"
_WIDTHS = ("center", "indent", "wordwrap", "truncate", "batch", "slice", "round")
_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


class Template:
    """One compiled template. Raises ConfigError when the source is not valid Jinja."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(
                f"the chat template has {len(source)} characters, at most {MAX_SOURCE_CHARS} are allowed",
                "chat_template",
            )
        self.source = source
        environment = _Environment()
        try:
            self.forms = message_forms(environment.parse(source))
            self._compiled = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {_short(error)}", "chat_template") from None
        except (*_FAILURES, SyntaxError) as error:  # too deeply nested for Jinja's parser, or for Python's compiler
            reason = f"{type(error).__name__}: {_short(error)}"
            raise ConfigError(f"the chat template cannot be compiled: {reason}", "chat_template") from None

    def render(self, variables: dict[str, Any], max_chars: int | None = None) -> str:
        """The text. Raises InputError when the template refuses the messages or fails on them.

        max_chars: of the text; None: only what any template may write.
        """
        parts: list[str] = []
        size = 0
        most = template_limits.MAX_CHARS if max_chars is None else max_chars
        try:
            with template_limits.metered():
                for part in self._compiled.generate(variables):
                    size += len(part)
                    if size > most:
                        raise jinja2.TemplateRuntimeError(f"a prompt over the limit of {most} characters")
                    parts.append(part)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refused the messages: {_short(error)}", "messages") from None
        except _FAILURES as error:
            reason = f"{type(error).__name__}: {_short(error)}".removesuffix(": ")
            raise InputError(f"the chat template failed on the messages: {reason}", "messages") from None
        return "".join(parts)


def _short(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "…"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        for name in _WIDTHS:
            self.filters[name] = template_limits.bounded(self.filters[name])
        self.filters["tojson"] = _to_json
        self.filters["join"] = _join
        self.filters["format"] = _format
        self.filters["replace"] = _replace
        self.filters[_METERED] = _metered
        self.filters[_CONCAT] = _concatenated
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that are too large, before they are made."""
        template_limits.check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        template_limits.meter().step()
        template_limits.check_call(called, args)
        return super().call(context, called, *args, **kwargs)


class _Metering(NodeTransformer):
    """Sends every loop (recursive ones at each level), and every `~`, through a filter that counts."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (the name of the node)
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _METERED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Call:  # noqa: N802 (the name of the node)
        self.generic_visit(node)
        if isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.args:
            node.args[0] = nodes.Filter(node.args[0], _METERED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 (the name of the node)
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, _CONCAT, [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered and nothing else."""

    tags = {"generation"}  # noqa: RUF012 (the base class says a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body).set_lineno(line)]


@jinja2.pass_context  # so it is never folded
def _metered(_context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterable[Any]:
    meter = template_limits.meter()

    def count() -> Iterator[Any]:
        for item in items:
            meter.step()
            yield item

    if isinstance(items, jinja2.Undefined) or not isinstance(items, Iterable):
        return items  # fails or stays empty as it would without the meter
    return count()


def _concatenated(items: list[Any]) -> str:
    texts = [str(item) for item in items]
    template_limits.check_size(sum(map(len, texts)))
    return "".join(texts)


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    template_limits.check_join(items, len(d))
    return jinja2.filters.sync_do_join(context, items, d, attribute)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    template_limits.check_percent(value, kwargs or args)
    return jinja2.filters.do_format(value, *args, **kwargs)


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, value: str, old: str, new: str, count: int | None = None) -> str:
    template_limits.check_size(len(value) + value.count(old) * len(new))
    return jinja2.filters.do_replace(context, value, old, new, count)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; models were trained on plain JSON."""
    if (len(indent) if isinstance(indent, str) else indent or 0) > template_limits.MAX_INDENT:
        raise jinja2.TemplateRuntimeError(f"an indent of JSON is over the limit of {template_limits.MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
