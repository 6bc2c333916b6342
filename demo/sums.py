"""Exercises with numbers: sums and differences, chains of them, and small word problems."""

from __future__ import annotations

from random import Random

from demo import words
from demo.task import Task, ask, user
from demo.words import listed, options


def _number(rng: Random) -> int:
    return rng.randrange(10 ** rng.choice((1, 2, 3, 3)))


def _by_place(a: int, b: int, sign: str) -> str:
    """Written-out column arithmetic, hundreds first."""
    larger, smaller = (b, a) if sign == "-" and b > a else (a, b)
    steps, parts = [], []
    for place in (100, 10, 1):
        x, y = larger // place % 10 * place, smaller // place % 10 * place
        if x or y:
            parts.append(x + y if sign == "+" else x - y)
            steps.append(f"{x} {sign} {y} = {parts[-1]}")
    total = parts[0] if parts else 0
    for part in parts[1:]:
        steps.append(f"{total} {'-' if part < 0 else '+'} {abs(part)} = {total + part}")
        total += part
    if larger != a:
        steps.append(f"{b} is larger than {a}, so the result is {-total}")
    return "\n".join(steps or ["Both numbers are 0."])


_SUMS = {
    "+": options(
        """
        {a} + {b} | What is {a} + {b} | What is {a} plus {b} | Add {a} and {b} | How much is {a} + {b} |
        Calculate {a} + {b} | {a}+{b} | {a} + {b} = | What's the sum of {a} and {b} | Compute {a} plus {b}
        """
    ),
    "-": options(
        """
        {a} - {b} | What is {a} - {b} | What is {a} minus {b} | Subtract {b} from {a} |
        How much is {a} - {b} | Calculate {a} - {b} | {a}-{b} | {a} - {b} = | Take {b} away from {a} |
        Compute {a} minus {b}
        """
    ),
}


def arithmetic(rng: Random) -> Task:
    sign, a, b = rng.choice("+-"), _number(rng), _number(rng)
    question = ask(rng, rng.choice(_SUMS[sign]).format(a=a, b=b))
    result = a + b if sign == "+" else a - b
    return Task(
        "arithmetic",
        f"arithmetic/{a}{sign}{b}",
        [user(question)],
        f"{a} {sign} {b} = {result}",
        _by_place(a, b, sign),
    )


_GAIN = options(
    """
    finds {n} more | buys {n} more | gets {n} more from a friend | collects {n} more | picks up {n} more |
    buys {n} | finds {n}
    """
)
_LOSE = options(
    """
    gives away {n} | loses {n} | sells {n} | breaks {n} | drops {n} on the way | uses {n} |
    gives {n} to a friend
    """
)
_FOOD = listed(
    """
    apples cakes cookies eggs lemons melons nuts onions oranges pears plums
    """
)


def word_problem(rng: Random) -> Task:
    """One to three steps of adding and taking away, told as a tiny story."""
    name, item, total = words.name(rng), rng.choice(words.ITEMS), rng.randint(3, rng.choice((20, 400)))
    lose = (*_LOSE, "eats {n}", "eats {n} of them") if item in _FOOD else _LOSE
    most = 15 if total <= 20 else 300
    events, steps, start = [], [f"{name} starts with {total} {item}."], total
    for _ in range(rng.choice((1, 2, 2, 3))):
        gain = rng.random() < 0.5 or total < 2
        n = rng.randint(1, most) if gain else rng.randint(1, min(total, 300))
        after = total + n if gain else total - n
        events.append(rng.choice(_GAIN if gain else lose).format(n=n))
        steps.append(f"{total} {'+' if gain else '-'} {n} = {after}.")
        total = after
    who = rng.choice((name, name, "he", "she"))
    if rng.random() < 0.5:
        told = f"{who} " + (", ".join(events[:-1]) + " and then " if len(events) > 1 else "") + events[-1] + "."
    else:
        told = " ".join(f"{who if i == 0 else f'Then {who}'} {event}." for i, event in enumerate(events))
    asked = rng.choice(
        (
            f"How many {item} does {name} have now",
            f"How many {item} does {who} have",
            "How many are left",
            f"How many {item} are there now",
            f"How many {item} does {name} have left",
        )
    )
    text = f"{name} has {start} {item}. {told[0].upper()}{told[1:]} {asked}?"
    return Task("thinking", f"problem/{text}", [user(text)], f"{name} has {total} {item}.", "\n".join(steps))


def chain(rng: Random) -> Task:
    """A sum of three numbers, one step at a time."""
    total = rng.randint(0, 300)
    terms, steps = [str(total)], []
    for _ in range(2):
        sign, n = rng.choice("+-"), rng.randint(1, 300)
        after = total + n if sign == "+" else total - n
        steps.append(f"{total} {sign} {n} = {after}.")
        terms += [sign, str(n)]
        total = after
    text = " ".join(terms)
    question = ask(rng, rng.choice(("What is {}", "Calculate {}", "{}", "How much is {}")).format(text))
    return Task("thinking", f"chain/{text}", [user(question)], f"{text} = {total}", "\n".join(steps))


def thinking(rng: Random) -> Task:
    """The tasks that are scored with thinking switched on: word problems, and sums done in steps."""
    task = rng.choices((word_problem, chain, arithmetic), (6, 2, 2))[0](rng)
    task.skill, task.thinking = "thinking", True
    return task
