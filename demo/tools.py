"""Tool-call exercises: what is offered, what is asked, which call is right, and what to say about its result.

Every offered tool is renamed and reworded at random, and some are invented outright, so that the model has
to read the list instead of remembering it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from demo import words
from demo.chat import Tool, tool_call
from demo.task import Task, ask, assistant, user
from demo.toolkit import KINDS, Kind, Slot, Values, invented

NO_TOOL = "I cannot do that without a tool for it."
NO_FIT = "None of my tools can do that."

_OPTIONS: tuple[dict[str, Values], ...] = (
    {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    {"limit": {"type": "integer", "description": "Largest number of results"}},
    {"lang": {"type": "string", "description": "Language of the answer"}},
    {"verbose": {"type": "boolean"}},
)


@dataclass(frozen=True)
class Offer:
    """A tool as one conversation sees it."""

    kind: Kind
    name: str
    about: str
    arguments: dict[str, str]  # slot -> the name it goes by here
    option: dict[str, Values]  # at most one argument that may be left out, and always is

    def schema(self, bare: bool) -> Tool:
        properties = {}
        for key, slot in self.kind.slots.items():
            field: Values = {"type": _json_type(slot)}
            if slot.choices:
                field["enum"] = list(slot.choices)
            if not bare:
                field["description"] = slot.about
            properties[self.arguments[key]] = field
        parameters = {
            "type": "object",
            "properties": {**properties, **self.option},
            "required": list(properties),
        }
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": parameters},
        }


def _json_type(slot: Slot) -> str:
    return "string" if isinstance(slot.draw(Random(0)), str) else "integer"


def offers(rng: Random) -> list[Offer]:
    """One to four different tools."""
    kinds = [
        invented(rng) if rng.random() < 0.35 else kind for kind in rng.sample(KINDS, rng.choice((1, 2, 2, 3, 3, 4)))
    ]
    return [_offer(rng, kind) for kind in kinds]


def _offer(rng: Random, kind: Kind) -> Offer:
    arguments: dict[str, str] = {}
    for key, slot in kind.slots.items():
        free = [name for name in slot.names if name not in arguments.values()]
        arguments[key] = free[0] if rng.random() < 0.4 else rng.choice(free)
    option = rng.choice(_OPTIONS) if rng.random() < 0.25 else {}
    return Offer(kind, rng.choice(kind.names), rng.choice(kind.about), arguments, option)


def schemas(rng: Random, offered: list[Offer]) -> list[Tool]:
    bare = rng.random() < 0.4
    return [offer.schema(bare) for offer in offered]


def _request(rng: Random, kind: Kind) -> tuple[str, Values]:
    values = {key: slot.draw(rng) for key, slot in kind.slots.items()}
    text = words.articles(rng.choice(kind.requests).format(**values))
    return ask(rng, text, "", lower=False) + rng.choice(("", "?", ".")), values


def request(rng: Random, offered: list[Offer]) -> Task:
    """Ask for something that one of the tools does; one time in three, its result is already in."""
    offer = rng.choice(offered)
    question, values = _request(rng, offer.kind)
    call = tool_call(offer.name, {offer.arguments[key]: value for key, value in values.items()})
    thought = f"The tool {offer.name} fits this request."
    if rng.random() < 0.67:
        return Task("tools", f"tools/{question}", [user(question)], call, thought)
    result = offer.kind.result(rng)
    messages = [user(question), assistant(call), {"role": "tool", "content": json.dumps(result)}]
    answer = offer.kind.reply.format(**{**values, **result})
    return Task("tools", f"tools/{question}", messages, answer, "The tool has answered, so I can tell the user.")


def misfit(rng: Random, offered: list[Offer]) -> Task:
    """Ask for something that none of the tools does (or that needs a tool, with none on offer)."""
    taken = {offer.kind.about for offer in offered}
    others = [kind for kind in KINDS if kind.about not in taken and (offered or "multiply" not in kind.names)]
    kind = rng.choice(others)
    question, _ = _request(rng, kind)
    if offered:
        return Task("tools", f"tools/{question}", [user(question)], NO_FIT, "No tool in the list fits this request.")
    return Task("chat", f"tools/{question}", [user(question)], NO_TOOL, "This would need a tool, and I have none.")
