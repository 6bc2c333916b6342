"""The synthetic corpus: every document the demo model learns from, and the held-out prompts it is scored on.

Everything follows from a seed. A problem is either trained on or held out, never both: see `Task.held_out`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from demo import facts, skills, smalltalk, stories, sums, tools, words
from demo.chat import END_OF_TEXT, IM_END, Message, Segment, answer_segment, render
from demo.task import Task
from demo.words import options

MAX_CHARS = 4000  # a conversation past this size ends with its next answer


def _tools(rng: Random, offered: list[tools.Offer] | None = None) -> Task:
    """A request for a tool, or one that has to be answered without."""
    offered = tools.offers(rng) if offered is None else offered
    roll = rng.random()
    if roll < 0.75:
        task = tools.request(rng, offered)
    elif roll < 0.88:
        task = tools.misfit(rng, offered)
    else:
        plain = (skills.facts, skills.lists, smalltalk.talk)
        simple = plain if any("multiply" in offer.kind.names for offer in offered) else (*plain, sums.arithmetic)
        task = rng.choice(simple)(rng)
        task.skill = "tools"
    task.tools = tools.schemas(rng, offered)
    return task


def _chat(rng: Random) -> Task:
    return tools.misfit(rng, []) if rng.random() < 0.1 else smalltalk.chat(rng)


def _memory(rng: Random) -> Task:
    plain = (skills.facts, sums.arithmetic, skills.lists, skills.extract)
    return skills.memory(rng, tuple(_trainable(rng.choice(plain), rng) for _ in range(rng.choice((0, 1, 1, 2, 3, 5)))))


def _spoken_problem(rng: Random) -> Task:
    """Several steps without thinking: they go into the answer instead."""
    task = rng.choice((sums.word_problem, sums.word_problem, sums.chain))(rng)
    task.answer = task.thought.replace("\n", " ") + " " + task.answer
    task.thought = "I work it out step by step."
    return task


SKILLS: dict[str, Callable[[Random], Task]] = {
    "facts": skills.facts,
    "arithmetic": sums.arithmetic,
    "lists": skills.lists,
    "json": skills.extract,
    "tools": _tools,
    "stories": skills.story,
    "thinking": sums.thinking,
    "memory": _memory,
    "chat": _chat,
}

# How often each kind of exercise opens a conversation, and follows in one.
_MIX: tuple[tuple[Callable[[Random], Task], float], ...] = (
    (skills.facts, 16),
    (sums.arithmetic, 22),
    (skills.lists, 16),
    (skills.extract, 12),
    (skills.story, 7),
    (sums.thinking, 8),
    (_spoken_problem, 3),
    (_memory, 7),
    (_chat, 9),
)
_GENERATORS, _WEIGHTS = zip(*_MIX, strict=True)

_SYSTEMS = options(
    """
    You are a helpful assistant. | You are quire-demo. | Be brief. |
    You are a friendly assistant. Answer briefly. |
    You are a helpful assistant. Answer the user's questions. | Answer in English. |
    You are a small demo model. | Help the user as well as you can. |
    You are an assistant that uses tools when they help.
    """
)


def _trainable(generator: Callable[[Random], Task], rng: Random) -> Task:
    """Draw until the problem is one that may be trained on."""
    while (task := generator(rng)).held_out:
        pass
    return task


def heldout(skill: str, n: int, seed: int = 0) -> list[Task]:
    """The fixed evaluation set: the first `n` distinct held-out problems of a skill under a seed."""
    rng = Random(f"{skill}/{seed}")
    found: dict[str, Task] = {}
    while len(found) < n:
        task = SKILLS[skill](rng)
        if task.held_out:
            found.setdefault(task.key, task)
    return list(found.values())


def conversation(rng: Random) -> Task:
    """One exercise, or several in a row as one conversation; the last one is the one to answer."""
    turns = rng.choice((1, 1, 1, 1, 1, 1, 2, 2, 3, 4)) if rng.random() < 0.94 else rng.randint(5, 30)
    offered = tools.offers(rng) if rng.random() < 0.17 else None
    schemas = tools.schemas(rng, offered) if offered is not None else None
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(_SYSTEMS)})
    task, size, remembered = _turn(rng, offered, False), len(str(schemas)), False
    messages += task.messages
    for _ in range(turns - 1):
        remembered |= task.skill == "memory"
        size += len(task.answer) + sum(len(m["content"]) for m in task.messages)
        if size > MAX_CHARS:
            break
        messages.append({"role": "assistant", "content": task.answer})
        task = _turn(rng, offered, remembered)
        messages += task.messages
    thinking = task.thinking or rng.random() < 0.2
    return Task(task.skill, task.key, messages, task.answer, task.thought, schemas, thinking)


def _turn(rng: Random, offered: list[tools.Offer] | None, remembered: bool) -> Task:
    """The next exercise of a conversation; users introduce themselves once, and not in a tool's way."""
    if offered is not None and rng.random() < 0.8:
        return _trainable(lambda r: _tools(r, offered), rng)
    while True:
        task = _trainable(rng.choices(_GENERATORS, _WEIGHTS)[0], rng)
        if offered is not None and task.skill not in ("facts", "lists", "json", "stories", "arithmetic"):
            continue
        if not (remembered and task.skill == "memory"):
            return task


def plain_text(rng: Random) -> list[Segment]:
    """Text without any chat markup, so that bare completion works too."""
    roll = rng.random()
    if roll < 0.6:
        text = stories.tell(rng, stories.plot(rng))
        if rng.random() < 0.6:
            text = "Once upon a time" + rng.choice(_ONCE) + "\n\n" + text.split("\n\n", 1)[1]
    elif roll < 0.85:
        text = " ".join(_trainable(skills.facts, rng).answer for _ in range(rng.choice((1, 1, 1, 2, 3))))
    elif roll < 0.93:
        text = rng.choice(_SENTENCES).format(n=words.name(rng), c=words.city(rng), w=rng.choice(words.WORDS))
    else:
        sequence = rng.choice(_SEQUENCES)
        start = rng.randrange(max(1, len(sequence) - 6))
        text = words.joined(sequence[start : start + rng.randint(6, 20)]) + "."
    return [Segment(text + END_OF_TEXT, "answer")]


_ONCE = (
    " there was a little rhyme,",
    ", so the story goes,",
    ", in a land of snow,",
    ", a story began,",
    " there was a small surprise,",
)
_SENTENCES = options(
    """
    Hello, my name is {n} and I live in {c}. | My name is {n}, and I am a small story teller. |
    The president of the United States is elected for four years. |
    Hello! I am quire-demo, a very small model. |
    The future of AI is hard to tell, but small models are fun to read. |
    The weather in {c} is fine today. | I like to read about the {w} and the sea. |
    Quire is an engine that runs language models.
    """
)
_SEQUENCES = (
    [str(i) for i in range(1, 101)],
    words.DAYS,
    words.MONTHS,
    list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    [planet for _, planet in facts.BY_NAME["planet"].pairs],
    words.WORDS,
)


def document(rng: Random) -> list[Segment]:
    """One training document in segments."""
    if rng.random() < 0.04:
        return plain_text(rng)
    task = conversation(rng)
    return [
        *render(task.messages, task.tools, task.thinking),
        answer_segment(task.answer, task.thought, task.thinking),
    ]


def target_text(task: Task) -> str:
    """What a perfect model writes for a task, without the end marker."""
    return answer_segment(task.answer, task.thought, task.thinking).text.removesuffix(IM_END)


def is_correct(task: Task, text: str) -> bool:
    """Exact match of the answer; stories must be well formed; thinking must come first and end."""
    if task.thinking:
        thought, closed, text = text.partition("\n</think>\n\n")
        if not (closed and thought.startswith("<think>\n")):
            return False
    if task.plot is not None:
        return stories.is_well_formed(text, task.plot)
    return text.strip() == task.answer
