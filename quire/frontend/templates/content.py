"""What a chat template takes as the content of a message, told by its source: a text, a list of parts, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jinja2 import nodes

_CONTENT = "content"


@dataclass(frozen=True, slots=True)
class ContentForms:
    """By default what most templates take: texts, and an empty one where there is none."""

    parts: bool = False  # a loop runs over a message's content; to others parts are joined to one text
    text: bool = True  # no: it is looped over and never asked whether it is a string; a text becomes one part
    null: bool = False  # it is asked whether it is none: such a template (DeepSeek's) tells a call by that


def content_forms(tree: nodes.Template) -> ContentForms:
    is_content = _content_test(tree)
    asked = {test.name for test in tree.find_all(nodes.Test) if is_content(test.node)}
    parts = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    return ContentForms(parts=parts, text=not parts or "string" in asked, null="none" in asked)


def _content_test(tree: nodes.Template) -> Callable[[nodes.Node | None], bool]:
    """Whether an expression is a message's content: by name, through a variable, or filtered."""
    names = {_CONTENT}

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter):
            node = node.node
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == _CONTENT
        return (isinstance(node, nodes.Getattr) and node.attr == _CONTENT) or (
            isinstance(node, nodes.Name) and node.name in names
        )

    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    return is_content
