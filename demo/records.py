"""Sentences that state a few facts, with the fields they state: what the JSON exercises are made of."""

from __future__ import annotations

from random import Random
from typing import Any

from demo import words
from demo.words import Draw, between, one_of, options


def _name(rng: Random) -> str:
    return words.full_name(rng) if rng.random() < 0.5 else words.name(rng)


def _email(rng: Random) -> str:
    return f"{words.name(rng).lower()}@{words.made_up(rng)}.{rng.choice(('com', 'org', 'net'))}"


def _phone(rng: Random) -> str:
    return f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"


_EVENTS = options("concert | workshop | meeting | lecture | picnic | exhibition | tournament | book club | dance class")

# Each kind of record: how to draw its fields, and the sentences that may state them.
_KINDS: tuple[tuple[dict[str, Draw], tuple[str, ...]], ...] = (
    (
        {"name": words.full_name, "age": between(4, 99), "city": words.city},
        options(
            """
            {name} is {age} years old and lives in {city}. | {name} ({age}) comes from {city}. |
            Our new colleague {name} moved to {city} at the age of {age}. |
            In {city} we met {name}, aged {age}.
            """
        ),
    ),
    (
        {"name": _name, "age": between(1, 99)},
        options("{name} is {age} years old. | {name}, {age} years of age. | Meet {name}, who turned {age} today."),
    ),
    (
        {"name": _name, "city": words.city},
        options(
            """
            {name} lives in {city}. | {name} moved to {city}. | {name} from {city} called. |
            I met {name} in {city}.
            """
        ),
    ),
    (
        {"event": one_of(_EVENTS), "day": one_of(words.DAYS), "time": words.clock, "city": words.city},
        options(
            """
            The {event} takes place on {day} at {time} in {city}. | {event} in {city}: {day}, {time}. |
            Join us in {city} this {day} for the {event}, starting at {time}.
            """
        ),
    ),
    (
        {
            "customer": words.name,
            "quantity": between(2, 60),
            "item": one_of(words.ITEMS),
            "price": between(1, 500),
        },
        options(
            """
            {customer} ordered {quantity} {item} for {price} euros. |
            Order: {quantity} {item}, {price} euros, {customer}. |
            For {price} euros, {customer} bought {quantity} {item}. |
            {customer} paid {price} euros for {quantity} {item}.
            """
        ),
    ),
    (
        {"name": words.name, "from": words.city, "to": words.city, "month": one_of(words.MONTHS)},
        options(
            """
            {name} travels from {from} to {to} in {month}. |
            In {month}, {name} takes the train from {from} to {to}. |
            A ticket for {name}: {from} to {to}, {month}.
            """
        ),
    ),
    (
        {"city": words.city, "temperature": between(-15, 40), "condition": one_of(words.CONDITIONS)},
        options(
            """
            It is {temperature} degrees and {condition} in {city}. |
            {city} will be {condition} with {temperature} degrees. |
            Weather for {city}: {condition}, {temperature} degrees.
            """
        ),
    ),
    (
        {"product": one_of(words.WORDS), "color": one_of(words.COLORS), "price": between(1, 999)},
        options(
            """
            The {color} {product} costs {price} dollars. |
            We sell a {color} {product} for {price} dollars. |
            For sale: {product}, {color}, {price} dollars.
            """
        ),
    ),
    (
        {"name": words.full_name, "email": _email, "phone": _phone},
        options(
            """
            Write to {name} at {email} or call {phone}. | {name}: {email}, {phone}. |
            {name} can be reached at {phone} and {email}.
            """
        ),
    ),
)


def record(rng: Random) -> tuple[str, dict[str, Any]]:
    """A sentence and every field it states, in the order in which they are usually asked for."""
    draws, sentences = rng.choice(_KINDS)
    fields = {key: draw(rng) for key, draw in draws.items()}
    return rng.choice(sentences).format(**fields), fields
