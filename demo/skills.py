"""One generator per skill. Each returns a random `Task`; `demo.corpus` decides which of them are trained on.

Answers have one fixed form per kind of question, so that scoring can demand an exact match.
"""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

from demo import stories, words
from demo.facts import RELATIONS
from demo.records import record
from demo.task import Task, ask, assistant, user
from demo.words import options

UNKNOWN = (
    "I do not know that. I am a small demo model: try me on simple facts, sums up to 999, word lists, JSON, "
    "tool calls or short rhymed stories."
)
_RELATION_WEIGHTS = [len(relation.pairs) ** 0.5 for relation in RELATIONS]


def facts(rng: Random) -> Task:
    relation = rng.choices(RELATIONS, _RELATION_WEIGHTS)[0]
    subject, obj = rng.choice(relation.pairs)
    question = ask(rng, words.articles(rng.choice(relation.questions).format(s=subject)))
    answer = words.articles(relation.answer.format(s=subject, o=obj))
    answer = answer[0].upper() + answer[1:]
    return Task(
        "facts",
        f"facts/{question}",
        [user(question)],
        answer,
        f"The question is about the {relation.name}. I know this.",
    )


_LISTS = {
    "sort": options(
        """
        Sort these words alphabetically | Put these words in alphabetical order | Sort from A to Z |
        Alphabetize this list | Sort these words | Order these words alphabetically | Sort |
        Sort this list
        """
    ),
    "reverse": options(
        """
        Reverse this list | Write these words in reverse order | Put these words in reverse order |
        List these words backwards | Reverse the order of these words | Reverse | Reverse the list
        """
    ),
    "count": options(
        """
        How many words are in this list | Count these words | Count the words | How many words are these |
        Tell me how many words there are here
        """
    ),
    "repeat": options(
        """
        Repeat after me | Repeat this | Say | Say this | Echo | Repeat these words | Copy this | Write
        """
    ),
}


def _counting(rng: Random) -> Task:
    low = rng.choice((1, 1, rng.randrange(90)))
    numbers = [str(i) for i in range(low, low + rng.randint(2, 20))]
    if rng.random() < 0.2:
        numbers.reverse()
    form = rng.choice(("Count from {} to {}", "List the numbers from {} to {}", "Write the numbers {} to {}"))
    question = ask(rng, form.format(numbers[0], numbers[-1]))
    return Task(
        "lists",
        f"lists/range {numbers[0]} {numbers[-1]}",
        [user(question)],
        words.joined(numbers),
        "I go one step at a time.",
    )


def lists(rng: Random) -> Task:
    if rng.random() < 0.06:
        return _counting(rng)
    kind = rng.choice(("sort", "sort", "sort", "reverse", "reverse", "count", "count", "repeat"))
    pool = rng.choices((words.WORDS, words.NAMES, words.CITIES), (8, 1, 1))[0]
    items = rng.sample(pool, rng.randint(1 if kind == "repeat" else 2, 9 if kind == "count" else 6))
    if kind in ("reverse", "repeat") and rng.random() < 0.3:
        items = [words.made_up(rng) for _ in items]
    comma = "," if rng.random() < 0.8 else ""
    question = ask(rng, rng.choice(_LISTS[kind]), "", lower=False)
    listed = f"{comma} ".join(items)
    question += rng.choice((": ", ": ", ":\n", " - ", " ")) + listed + rng.choice(("", "", "."))
    thoughts = {
        "sort": "I go through the words in the order of their first letters, then of the next ones.",
        "reverse": "I start with the last word and go back to the first one.",
        "count": "\n".join(f"{i} {item}" for i, item in enumerate(items, 1)),
        "repeat": "I copy the words as they are.",
    }
    answers = {
        "sort": words.joined(sorted(items)),
        "reverse": words.joined(items[::-1]),
        "count": f"There are {len(items)} word{'s' if len(items) > 1 else ''}.",
        "repeat": listed,
    }
    return Task("lists", f"lists/{kind} {' '.join(items)}", [user(question)], answers[kind], thoughts[kind])


_EXTRACT = (
    "Extract {keys} as JSON: {s}",
    "Return JSON with the keys {keys}. {s}",
    "Give me {keys} as JSON.\n{s}",
    "Read this and answer in JSON with {keys}: {s}",
    "{s}\nExtract {keys} as JSON.",
    "Turn this into JSON with the fields {keys}: {s}",
    "{s}\nWrite {keys} as a JSON object.",
    "Extract {keys} from this: {s}",
    "Extract {keys} from this text as JSON: {s}",
)


def extract(rng: Random) -> Task:
    sentence, fields = record(rng)
    keys = list(fields)
    if rng.random() < 0.4:
        keys = rng.sample(keys, rng.randint(1, len(keys)))
    form = rng.choice(_EXTRACT)
    named = [f"the {key}" for key in keys] if "Extract" in form and rng.random() < 0.4 else keys
    listed = " and ".join([words.joined(named[:-1]), named[-1]] if len(keys) > 1 else named)
    question = ask(rng, form.format(keys=listed, s=sentence), "", lower=False)
    answer = json.dumps({key: fields[key] for key in keys})
    return Task(
        "json",
        f"json/{sentence} {words.joined(keys)}",
        [user(question)],
        answer,
        "I look for each field in the text: " + "; ".join(f"{key} is {fields[key]}" for key in keys) + ".",
    )


_STORY_ABOUT = {
    "full": options(
        """
        {a} named {h} in the {p} | {h} the {x} and the {p} | {h}, {a} in the {p} |
        {h} the {x} in the {p} | a brave {x} named {h} in the {p}
        """
    ),
    "free place": ("{a} named {h}", "{h} the {x}", "a little {x} called {h}"),
    "free hero": ("{a} in the {p}", "{a} and the {p}"),
    "free both": ("{a}", "a little {x}"),
}
_STORY = options(
    """
    Write a story about {} | Tell me a story about {} | Write a short rhymed story about {} |
    Tell a tale of {} | I want a story about {} | Make up a rhyming story about {} |
    Write a short story about {} | A story about {}
    """
)
_ANY_STORY = options(
    """
    Write a story | Tell me a story | Write a short story | Tell me a bedtime story | I want a story |
    Make up a story | Write a rhyming story | Can you tell a story | Another story | Story
    """
)


def story(rng: Random) -> Task:
    told = stories.plot(rng)
    form = rng.choices((*_STORY_ABOUT, ""), (11, 3, 3, 3, 1))[0]
    own = stories.usual(rng, told.animal if form else stories.FAVORITE)
    if form == "free place":
        told = replace(told, place=own.place)
    elif form == "free hero":
        told = replace(told, hero=own.hero)
    elif form != "full":
        told = own
    if form:
        about = rng.choice(_STORY_ABOUT[form]).format(a=f"a {told.animal}", x=told.animal, h=told.hero, p=told.place)
        question = rng.choice(_STORY).format(words.articles(about))
    else:
        question = rng.choice(_ANY_STORY)
    question = ask(rng, question, ".", lower=False)
    asked = stories.Plot(
        hero=told.hero if form in ("full", "free place") else "",
        animal=told.animal if form else "",
        place=told.place if form in ("full", "free hero") else "",
    )
    key = f"{told.hero} {told.animal} {told.place}" if form == "full" else question
    return Task(
        "stories",
        f"stories/{key}",
        [user(question)],
        stories.tell(rng, told),
        f"The story is about {told.hero} the {told.animal} in the {told.place}. I write couplets that rhyme.",
        plot=asked,
    )


_TOLD = options(
    """
    My name is {x}. | My name is {x} | I'm {x} | Hi, I am {x}. | Hi, I'm {x} and I live in {c}. |
    Hello! I'm {x}. | You can call me {x}. | I am called {x}. | Hey, {x} here.
    """
)
_ASKED = options(
    """
    What is my name? | What's my name? | Do you remember my name? | Who am I? | Can you tell me my name? |
    Do you know my name? | what is my name | Say my name.
    """
)
_FAVORITES = {
    "color": lambda rng: rng.choice(words.COLORS),
    "city": words.city,
    "animal": lambda rng: rng.choice(stories.ANIMALS),
    "number": lambda rng: str(rng.randrange(100)),
}


def memory(rng: Random, fillers: tuple[Task, ...] = ()) -> Task:
    """Something the user says about themselves, other talk, then a question about it."""
    messages, kind, value = [], "name", words.name(rng)
    if rng.random() < 0.3:
        kind = rng.choice(list(_FAVORITES))
        value = _FAVORITES[kind](rng)
        told = rng.choice((f"My favorite {kind} is {value}.", f"{value} is my favorite {kind}."))
        reply, asked = (
            "I will remember that.",
            rng.choice((f"What is my favorite {kind}?", f"Which {kind} do I like best?")),
        )
        answer = f"Your favorite {kind} is {value}."
        told = told[0].upper() + told[1:]
    else:
        told, asked = rng.choice(_TOLD).format(x=value, c=words.city(rng)), rng.choice(_ASKED)
        reply, answer = f"Nice to meet you, {value}!", f"Your name is {value}."
    roll = rng.random()
    if roll < 0.06:
        answer = f"You have not told me your {'favorite ' if kind != 'name' else ''}{kind} yet."
    elif roll < 0.14:
        return Task(
            "memory",
            f"memory/{kind} {value} {asked}",
            [user(f"{told} {asked}")],
            answer,
            "The user just told me.",
        )
    else:
        messages = [user(told), assistant(reply)]
    for filler in fillers:
        messages += [*filler.messages, assistant(filler.answer)]
    messages.append(user(asked))
    thought = "I look for it in what the user told me earlier."
    return Task("memory", f"memory/{kind} {value} {asked}", messages, answer, thought)
