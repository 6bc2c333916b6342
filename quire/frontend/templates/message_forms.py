"""What a chat template takes as the content of a message, and where it looks for tools, told by its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

_CONTENT, _TOOLS = "content", "tools"


@dataclass(frozen=True, slots=True)
class MessageForms:
    """By default what most templates take: texts, an empty one where there is none; tools beside the messages."""

    parts: bool = False  # a loop runs over a message's content; to others parts are joined to one text
    text: bool = True  # no: it is looped over and never asked whether it is a string; a text becomes one part
    null: bool = False  # it is asked whether it is none: such a template (DeepSeek's) tells a call by that
    tools: bool = False  # they are a message's own (Phi 4 mini, GLM 4), and nothing else shows the model any
    variables: frozenset[str] = field(default=frozenset(), compare=False)  # that it reads, of those it is given


def message_forms(tree: nodes.Template) -> MessageForms:
    is_content = _content_test(tree)
    asked = {test.name for test in tree.find_all(nodes.Test) if is_content(test.node)}
    parts = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    tools = any(_name(node) == _TOOLS for node in tree.find_all((nodes.Getattr, nodes.Getitem)))
    variables = frozenset(find_undeclared_variables(tree))
    return MessageForms(
        parts=parts,
        text=not parts or "string" in asked,
        null="none" in asked,
        tools=tools and _TOOLS not in variables,
        variables=variables,
    )


def _name(node: nodes.Node | None) -> str | None:
    """Of the field that an expression looks up."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return str(node.arg.value)
    return None


def _content_test(tree: nodes.Template) -> Callable[[nodes.Node | None], bool]:
    """Whether an expression is a message's content: by name, through a variable, or filtered."""
    names = {_CONTENT}

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter):
            node = node.node
        return _name(node) == _CONTENT or (isinstance(node, nodes.Name) and node.name in names)

    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    return is_content
