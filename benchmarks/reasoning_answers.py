"""Answers as models write them, with what they mean, for every reasoning format; and ways to cut a text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

WORDS = [
    "let",
    "me",
    "think",
    "about",
    "the",
    "pages",
    "<b>",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "é",
    "你好",
    "🙂",
    "think",
    "</",
    "<",
    "<t",
    "</thin",
    "response:",
    "Here",
    "is",
    "my",
    "|",
    "<|",
    "|>",
    "tag",
    "a<b",
    "answer",
    "`code`",
    "3",
    "<",
    "4",
    "first\nsecond",
    "next:",
    "\n\n-",
    "one",
    "1.5",
    '{"a":',
    "1}",
    "[THIN",
    "/THINK]",
    "final",
    "channel",
]


@dataclass
class Written:
    """An answer's text, and what a client must see of it."""

    text: str
    reasoning: str
    content: str
    prompt: str = "<|user|>hello<|assistant|>\n"
    kwargs: dict[str, Any] = field(default_factory=dict)


def prose(rng: random.Random, least: int = 1, most: int = 25) -> str:
    """Words with no space at either end."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most))).strip() or "word"


@dataclass(frozen=True)
class Family:
    """start and end as the family writes them; behind them the spaces it puts there."""

    start: str
    end: str
    wrap: tuple[str, str] = ("", "")
    on: dict[str, Any] = field(default_factory=dict)  # template variables that switch thinking on
    off: dict[str, Any] | None = None  # … and off
    bare_is_open: bool = False  # without a word in the prompt the answer begins inside

    def write(self, rng: random.Random) -> Written:
        reasoning, content = prose(rng), prose(rng)
        kind = rng.choice(("usual", "opened", "cut", "closed", "off", "twice", "empty", "bare"))
        prompt = "<|user|>hi<|assistant|>"
        body = self.wrap[0] + content + self.wrap[1]
        if kind == "opened":
            prompt += self.start
            return Written(reasoning + self.end + body, reasoning, content, prompt, {**self.on})
        if kind == "cut":
            return Written(self.start + reasoning, reasoning, "", prompt, {**self.on})
        if kind == "closed":
            return Written(body, "", content, prompt + self.start + self.end, {**self.on})
        if kind == "off" and self.off is not None:
            return Written(body, "", content, prompt, {**self.off})
        if kind == "twice" and self.start:
            return Written(
                self.start + reasoning + self.end + self.end.strip("\n") + body, reasoning, content, prompt, {**self.on}
            )
        if kind == "empty":
            return Written(self.start + self.end + body, "", content, prompt, {**self.on})
        if kind == "bare":
            if self.bare_is_open:
                return Written(reasoning + self.end + body, reasoning, content, prompt, {**self.on})
            return Written(body, "", content, prompt, {**self.on})
        return Written(self.start + reasoning + self.end + body, reasoning, content, prompt, {**self.on})


THINK = ("<think>\n", "\n</think>\n\n")
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
FAMILIES: dict[str, Family] = {
    "deepseek_r1": Family(*THINK, bare_is_open=True),
    "deepseek_v3": Family("<think>", "</think>", on={"thinking": True}, off={}, bare_is_open=True),
    "deepseek_v4": Family("<think>", "</think>", on=ON, off={"thinking": False}, bare_is_open=True),
    "holo2": Family(*THINK, off={"thinking": False}, bare_is_open=True),
    "qwen3": Family(*THINK, off=OFF),
    "mimo": Family(*THINK, off=OFF),
    "nemotron_v3": Family(*THINK, off=OFF),
    "glm45": Family("\n<think>", "</think>\n", off=OFF),
    "glm47": Family("<think>", "</think>", off=OFF),
    "kimi_k2": Family("<think>", "</think>", off={"thinking": False}),
    "hy_v3": Family("<think>", "</think>", off={"reasoning_effort": "no_think"}),
    "ernie45": Family("<think>\n", "\n</think>\n\n", wrap=("<response>\n", "\n</response>\n"), off=OFF),
    "olmo3": Family("<think>", "</think>"),
    "poolside_v1": Family("<think>", "</think>", on=ON, off={}),
    "step3": Family("<think>\n", "\n</think>\n\n", bare_is_open=True),
    "step3p5": Family("<think>\n", "\n</think>\n"),
    "minimax_m2": Family("<think>\n", "\n</think>\n\n", bare_is_open=True),
    "minimax_m3": Family("<mm:think>", "</mm:think>"),
    "seed_oss": Family("<seed:think>", "</seed:think>"),
    "granite": Family("Here's my thought process: ", "\n\nHere is my response: "),
    "hunyuan_a13b": Family("<think>\n", "\n</think>\n", wrap=("<answer>\n", "\n</answer>")),
    "mistral": Family("[THINK]", "[/THINK]"),
    "gemma4": Family("<|channel>thought\n", "<channel|>"),
    "cohere_command3": Family(
        "<|START_THINKING|>", "<|END_THINKING|>", wrap=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "cohere_command4": Family("<|START_THINKING|>", "<|END_THINKING|>", wrap=("<|START_TEXT|>", "<|END_TEXT|>")),
}


def harmony(rng: random.Random) -> Written:
    """A row of messages; the last is the answer, or was cut inside the analysis."""
    reasoning, content, text = "", "", ""
    for _ in range(rng.randint(0, 3)):
        words = prose(rng)
        if rng.random() < 0.7:
            text += f"<|channel|>analysis<|message|>{words}<|end|><|start|>assistant"
            reasoning += words
        else:
            text += f"<|channel|>commentary<|message|>{words}<|end|><|start|>assistant"
            content += words
    if rng.random() < 0.8:
        words = prose(rng).rstrip("<| ") + "."  # half a marker at the very end is dropped
        text += f"<|channel|>final{rng.choice(('', ' <|constrain|>json'))}<|message|>{words}" + rng.choice(
            ("", "<|return|>")
        )
        content += words
    return Written(text, reasoning, content, "<|start|>assistant")


def inkling(rng: random.Random) -> Written:
    reasoning, content = prose(rng), prose(rng)
    text = f"<|content_thinking|>{reasoning}<|end_message|><|message_model|><|content_text|>{content}<|end_message|>"
    return Written(text, reasoning, content, "<|message_model|>")


def appended(rng: random.Random) -> Written:
    text = prose(rng) + "\n</think>\n\n" + prose(rng)
    return Written(text, "", "<think>" + text)


WRITERS: dict[str, Callable[[random.Random], Written]] = {
    **{name: family.write for name, family in FAMILIES.items()},
    "openai_gptoss": harmony,
    "inkling": inkling,
    "minimax_m2_append_think": appended,
}


def cuts(text: str, rng: random.Random, most: int) -> Iterator[Sequence[str]]:
    """Portions of the text: one character each, every cut in two (at most `most` of them), random ones."""
    yield list(text)
    places = range(1, len(text))
    for at in places if len(places) <= most else rng.sample(places, most):
        yield text[:at], text[at:]
    for _ in range(min(most, 5)):
        borders = sorted({0, len(text), *rng.choices(range(len(text) + 1), k=rng.randint(1, 12))})
        yield [text[a:b] for a, b in itertools.pairwise(borders)]
