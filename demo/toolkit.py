"""The tools that exercises offer: what each does, its arguments, how people ask for it, what to report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from demo import words
from demo.words import Draw, between, one_of, options

Values = dict[str, Any]


@dataclass(frozen=True)
class Slot:
    """One argument: the names it may go by, its description and where its values come from."""

    names: tuple[str, ...]
    about: str
    draw: Draw
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A family of tools that do the same thing under different names."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    slots: dict[str, Slot]
    requests: tuple[str, ...]
    result: Callable[[Random], Values]
    reply: str


def _phrase(rng: Random) -> str:
    """Two or three words that no request template contains."""
    return " ".join(
        words.made_up(rng) if rng.random() < 0.25 else rng.choice(words.WORDS) for _ in range(rng.choice((2, 3)))
    )


_CITY = Slot(("city", "location", "place", "town"), "Name of the city", words.city)
_PERSON = Slot(("person", "recipient", "to", "contact", "name"), "Who it is for", words.name)
_TEXT = Slot(("text", "message", "body", "content"), "The words themselves", _phrase)
_DAY = Slot(("day", "date", "weekday", "when"), "Day of the week", lambda rng: rng.choice(words.DAYS))
_TIME = Slot(("time", "at", "hour", "clock"), "Time as HH:MM", words.clock)
_CURRENCY = ("USD", "EUR", "GBP", "JPY", "CHF", "SEK")


def _code(rng: Random) -> str:
    """Letters and digits that spell no word, such as a ticker or an order number."""
    letters = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(1, 4)))
    return letters + (str(rng.randint(1, 999)) if rng.random() < 0.3 else "")


KINDS: tuple[Kind, ...] = (
    Kind(
        ("get_stock_price", "stock_price", "stock", "quote", "share_price"),
        ("Get the stock price for a ticker symbol", "Look up what a share costs"),
        {"symbol": Slot(("symbol", "ticker", "stock"), "Ticker symbol", _code)},
        options(
            """
            What is the stock price of {symbol} | How much is {symbol} trading at |
            What does a share of {symbol} cost | Look up the price of {symbol} | How is {symbol} doing
            """
        ),
        lambda rng: {"price": rng.randint(1, 999)},
        "{symbol} trades at {price}.",
    ),
    Kind(
        ("order_status", "track_order", "track_package", "find_order"),
        ("Look up the status of an order", "Track a package by its number"),
        {"order": Slot(("order", "order_id", "number", "tracking_id"), "Number of the order", _code)},
        options(
            """
            Where is my order {order} | What is the status of order {order} | Track order {order} |
            Has order {order} been sent
            """
        ),
        lambda rng: {"status": rng.choice(("packed", "shipped", "delivered", "delayed"))},
        "Order {order} is {status}.",
    ),
    Kind(
        ("get_weather", "weather_lookup", "current_weather", "fetch_weather", "weather"),
        ("Get the current weather in a city", "Look up the weather for a place", "Current weather report"),
        {"city": _CITY},
        options(
            """
            What is the weather in {city} | How is the weather in {city} today |
            Tell me the weather in {city} | Is it nice outside in {city} |
            What's the weather like in {city} right now
            """
        ),
        lambda rng: {"temperature": rng.randint(-15, 40), "condition": rng.choice(words.CONDITIONS)},
        "It is {temperature} degrees and {condition} in {city}.",
    ),
    Kind(
        ("get_time", "local_time", "clock", "time_in_city", "current_time"),
        ("Get the local time in a city", "Tell what time it is somewhere"),
        {"city": _CITY},
        options(
            """
            What time is it in {city} | Tell me the local time in {city} | How late is it in {city} |
            What's the time in {city} now
            """
        ),
        lambda rng: {"time": words.clock(rng)},
        "It is {time} in {city}.",
    ),
    Kind(
        ("convert_currency", "exchange", "currency_converter", "convert_money"),
        ("Convert an amount of money to another currency", "Exchange money at today's rate"),
        {
            "amount": Slot(("amount", "value", "sum"), "How much money", between(1, 999)),
            "source": Slot(("from", "source", "from_currency"), "Currency code to convert from", one_of(_CURRENCY[:3])),
            "target": Slot(("to", "target", "to_currency"), "Currency code to convert to", one_of(_CURRENCY[3:])),
        },
        options(
            """
            Convert {amount} {source} to {target} | How much is {amount} {source} in {target} |
            Change {amount} {source} into {target} | What are {amount} {source} worth in {target}
            """
        ),
        lambda rng: {"result": rng.randint(1, 9999)},
        "{amount} {source} are {result} {target}.",
    ),
    Kind(
        ("send_message", "send_text", "message", "text_contact"),
        ("Send a text message to a person", "Write a message to one of the user's contacts"),
        {"person": _PERSON, "text": _TEXT},
        options(
            """
            Send a message to {person}: {text} | Text {person} this: {text} | Write to {person}: {text} |
            Message {person} with the words: {text}
            """
        ),
        lambda _: {"status": "sent"},
        "I have sent your message to {person}.",
    ),
    Kind(
        ("set_timer", "start_timer", "timer", "countdown"),
        ("Start a timer", "Start a countdown in minutes"),
        {"minutes": Slot(("minutes", "duration", "length"), "Length in minutes", between(1, 120))},
        options(
            """
            Set a timer for {minutes} minutes | Start a timer of {minutes} minutes |
            Wake me in {minutes} minutes | Remind me in {minutes} minutes |
            Start a countdown of {minutes} minutes
            """
        ),
        lambda _: {"status": "running"},
        "Your timer is set to {minutes} minutes.",
    ),
    Kind(
        ("search_web", "web_search", "search", "find_online"),
        ("Search the web", "Find pages on the internet"),
        {"query": Slot(("query", "q", "terms", "search_text"), "What to search for", _phrase)},
        options(
            """
            Search the web for {query} | Look up {query} online | Find pages about {query} |
            Search for {query}
            """
        ),
        lambda rng: {"title": _phrase(rng), "results": rng.randint(1, 90)},
        "I found {results} results. The first one is called {title}.",
    ),
    Kind(
        ("add_event", "create_event", "schedule", "calendar_add"),
        ("Add an event to the calendar", "Put something in the user's calendar"),
        {
            "title": Slot(("title", "event", "subject", "summary"), "What the event is called", _phrase),
            "day": _DAY,
            "time": _TIME,
        },
        options(
            """
            Add {title} to my calendar on {day} at {time} | Schedule {title} for {day} at {time} |
            Put {title} on {day} at {time} in my calendar | Plan {title} on {day}, {time}
            """
        ),
        lambda _: {"status": "ok"},
        "I have added {title} to your calendar on {day} at {time}.",
    ),
    Kind(
        ("set_light", "switch_light", "light_control", "lamp"),
        ("Switch a light on or off", "Control the lights at home"),
        {
            "room": Slot(
                ("room", "where", "area"),
                "Which room",
                one_of(("kitchen", "bedroom", "hall", "bathroom", "office", "garage", "attic", "cellar")),
            ),
            "state": Slot(("state", "switch", "mode"), "The new state", one_of(("on", "off")), ("on", "off")),
        },
        options(
            """
            Turn {state} the light in the {room} | Switch the {room} light {state} |
            Light {state} in the {room}, please | Turn the {room} lamp {state}
            """
        ),
        lambda _: {"status": "done"},
        "The light in the {room} is now {state}.",
    ),
    Kind(
        ("roll_dice", "dice", "throw_dice", "roll"),
        ("Roll dice", "Throw some dice and add them up"),
        {
            "count": Slot(("count", "number", "dice"), "How many dice", between(1, 9)),
            "sides": Slot(("sides", "faces"), "Sides of each", between(4, 20)),
        },
        (
            "Roll {count} dice with {sides} sides",
            "Throw {count} dice that have {sides} sides",
            "Please roll {count} dice of {sides} sides",
        ),
        lambda rng: {"total": rng.randint(1, 99)},
        "The dice add up to {total}.",
    ),
    Kind(
        ("play_song", "play_music", "music", "start_song"),
        ("Play a song", "Play music by title and artist"),
        {
            "song": Slot(("song", "title", "track"), "Title of the song", _phrase),
            "artist": Slot(("artist", "singer", "by"), "Who performs it", words.full_name),
        },
        options(
            """
            Play {song} by {artist} | I want to hear {song} by {artist} | Put on {song} by {artist} |
            Play the song {song} from {artist}
            """
        ),
        lambda _: {"status": "playing"},
        "Now playing {song} by {artist}.",
    ),
    Kind(
        ("multiply", "calculator", "product", "times"),
        ("Multiply two whole numbers", "Work out a product"),
        {
            "a": Slot(("a", "first", "x"), "First factor", between(13, 999)),
            "b": Slot(("b", "second", "y"), "Second factor", between(13, 999)),
        },
        options(
            """
            What is {a} times {b} | Multiply {a} by {b} | What is {a} * {b} | How much is {a} x {b}
            """
        ),
        lambda rng: {"result": rng.randint(1000, 999999)},
        "The product of {a} and {b} is {result}.",
    ),
    Kind(
        ("book_table", "reserve_table", "restaurant_booking", "reserve"),
        ("Book a table", "Reserve seats at a restaurant"),
        {
            "place": Slot(
                ("restaurant", "place", "where"),
                "Name of the restaurant",
                lambda rng: words.made_up(rng).capitalize() if rng.random() < 0.5 else rng.choice(words.SURNAMES),
            ),
            "people": Slot(("people", "guests", "party_size"), "How many guests", between(2, 12)),
            "time": _TIME,
        },
        (
            "Book a table for {people} at {place} at {time}",
            "Reserve a table at {place} for {people} people at {time}",
            "I need a table for {people} in {place}, {time}",
        ),
        lambda _: {"status": "confirmed"},
        "Your table for {people} at {place} is booked for {time}.",
    ),
)


def invented(rng: Random) -> Kind:
    """A tool that exists in this one conversation only."""
    word, thing, key = (
        words.made_up(rng),
        rng.choice(words.WORDS),
        rng.choice(("id", "name", "code", "label", "key", "item")),
    )
    verb = rng.choice(("get", "find", "read", "look_up", "check"))
    draw = rng.choice((words.made_up, between(1, 9999), _code, lambda r: r.choice(words.WORDS)))
    return Kind(
        (f"{verb}_{word}", f"{word}_{verb}", f"{verb}_{thing}_{word}"),
        (
            words.articles(f"Get the {word} of a {thing}"),
            words.articles(f"Find out which {word} a {thing} has"),
        ),
        {key: Slot((key,), f"The {thing} in question", draw)},
        (
            f"What is the {word} of {thing} {{{key}}}",
            f"Find the {word} for {thing} {{{key}}}",
            f"Tell me the {word} of {thing} {{{key}}}",
            f"Which {word} does {thing} {{{key}}} have",
        ),
        lambda r: {"result": r.randint(1, 999) if r.random() < 0.5 else words.made_up(r)},
        f"The {word} of {thing} {{{key}}} is {{result}}.",
    )
