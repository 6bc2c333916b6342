"""Chat templates: Jinja as checkpoints expect it, in a sandbox with limits.

The sandbox forbids private attributes and changing its inputs. The limits (loop steps, characters) stop a template
that would run or grow without end; they guard against accidents, so templates still come from the operator only.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from quire.foundation.errors import ConfigError, InputError

MAX_SOURCE_CHARS = 1_000_000
MAX_LOOP_STEPS = 1_000_000
MAX_CHARS = 64 * 1024 * 1024  # of the prompt and of any text or list made on the way
MAX_BITS = 4096  # of an integer
_CONTENT = "content"


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
            self.wants_parts = _loops_over_content(environment.parse(source))
            self._compiled = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}", "chat_template") from None

    def render(self, variables: dict[str, Any]) -> str:
        """The text. Raises InputError when the template refuses the messages or fails on them."""
        parts: list[str] = []
        size = 0
        try:
            for part in self._compiled.generate({**variables, _METER: [MAX_LOOP_STEPS]}):
                size += _check_size(len(part))
                _check_size(size)
                parts.append(part)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refused the messages: {error}", "messages") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"the chat template failed on the messages: {reason}", "messages") from None
        return "".join(parts)


_METER = "_quire_steps_left"  # a template variable: one list with the number of loop steps left
_CONCAT = "_quire_concat"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters[_METER] = _metered
        self.filters[_CONCAT] = _concatenated
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that are too large, before they are made."""
        if isinstance(left, int) and isinstance(right, int):
            bits = {"**": left.bit_length() * right, "*": left.bit_length() + right.bit_length()}
            if bits.get(operator, 0) > MAX_BITS:
                raise jinja2.TemplateRuntimeError(f"a number is over the limit of {MAX_BITS} bits")
        elif (
            operator == "*"
            and isinstance(left, int | str | list | tuple)
            and isinstance(right, int | str | list | tuple)
        ):
            times, items = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and not isinstance(items, int):
                _check_size(len(items) * times)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


class _Metering(NodeTransformer):
    """Sends every loop, and every `~`, through a filter that counts."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (the name of the node)
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _METER, [], [], None, None, lineno=node.lineno)
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


@jinja2.pass_context
def _metered(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterable[Any]:
    steps_left = context.resolve(_METER)

    def count() -> Iterator[Any]:
        for item in items:
            if steps_left[0] == 0:
                raise jinja2.TemplateRuntimeError(f"more than {MAX_LOOP_STEPS} loop steps")
            steps_left[0] -= 1
            yield item

    if isinstance(items, jinja2.Undefined) or not isinstance(items, Iterable):
        return items  # fails or stays empty as it would without the meter
    return count()


def _concatenated(items: list[Any]) -> str:
    texts = [str(item) for item in items]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int) -> int:
    if size > MAX_CHARS:
        raise jinja2.TemplateRuntimeError(f"a text of {size} characters is over the limit of {MAX_CHARS}")
    return size


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a loop runs over a message's content: such a template takes lists of parts, others need a string."""
    names = {_CONTENT}

    def is_content(node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Filter) and node.name == _METER:
            node = node.node
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == _CONTENT
        return (isinstance(node, nodes.Getattr) and node.attr == _CONTENT) or (
            isinstance(node, nodes.Name) and node.name in names
        )

    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
