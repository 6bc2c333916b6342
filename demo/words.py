"""Word lists the corpus draws from, and a generator of words that nobody has seen before.

The made-up words matter: they force the model to copy what the user wrote instead of recalling it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Draw = Callable[[Random], Any]


def between(low: int, high: int) -> Draw:
    """Draws a number, both ends included."""
    return lambda rng: rng.randint(low, high)


def one_of(choices: Sequence[str]) -> Draw:
    """Draws one of the choices."""
    return lambda rng: rng.choice(choices)


def listed(text: str) -> list[str]:
    """The words of a text, as a list."""
    return text.split()


NAMES = listed(
    """
    Ada Adam Aiko Alba Alma Amir Anna Anton Arlo Asha Ben Bela Bruno Carla Cleo Clara Dan Daria Dina Diego
    Edith Elena Eli Emil Emma Erik Esther Eva Felix Fiona Finn Freya Gina Grace Greta Hana Hugo Ida Igor
    Ines Ivan Ivy Jack Jana Jonas Jude Julia Kai Karim Kate Kira Lars Lea Leo Lena Liam Lily Lola Luca
    Lucy Malik Mara Marco Maya Mia Milo Mina Mira Nadia Nina Noah Nora Olga Omar Oscar Otto Pablo Paul
    Petra Pia Priya Quinn Rafael Rania Rosa Ruth Sam Sara Selma Silas Sofia Stella Tara Theo Tim Tom Uma
    Vera Viktor Wanda Yara Yuki Zara Zeno Zoe
    """
)

SURNAMES = listed(
    """
    Adler Baker Brook Carter Castro Cole Diaz Dunn Ellis Farmer Fischer Garcia Grant Gray Hall Hill Hunt
    Ivanov Jensen Kaya Khan Kim Lane Lopez Marsh Meyer Moore Nash Novak Okoye Olsen Park Patel Perez Reed
    Rossi Sato Silva Singh Stone Tanaka Vogel Walsh Weber West Wong Wood Young Zhang
    """
)

CITIES = listed(
    """
    Amsterdam Athens Austin Barcelona Basel Beijing Bergen Berlin Bologna Bonn Boston Bremen Brussels
    Bucharest Budapest Cairo Chicago Cologne Copenhagen Cork Dallas Delhi Denver Dublin Geneva Genoa Ghent
    Glasgow Hamburg Hanoi Havana Helsinki Istanbul Kyoto Lagos Leeds Leipzig Lima Lisbon London Lyon
    Madrid Malmo Manila Melbourne Miami Milan Montreal Mumbai Munich Nairobi Naples Nice Osaka Oslo Ottawa
    Paris Perth Porto Prague Quito Riga Rome Rotterdam Seattle Seoul Seville Sofia Sydney Tallinn Tokyo
    Toronto Tunis Turin Valencia Vienna Vilnius Warsaw Zagreb Zurich
    """
)

WORDS = listed(
    """
    acorn actor apple apron arrow autumn badge baker banana barn basket beach bean bear bee bell berry
    bike bird blanket boat book boot bottle bowl box branch bread brick bridge brush bucket bus butter
    button cabin cake camel camera candle canoe carpet carrot castle cat chair cheese cherry circle clock
    cloud clown coat coin comet cookie copper corn cotton cow crab crow crown cup daisy deer desk dog
    dolphin door dragon dress drum duck eagle ear earth egg elbow engine envelope eye falcon farm feather
    fence fiddle field finger fire fish flag flower flute forest fork fox frog fruit garden garlic gate
    ghost giraffe glass glove goat gold goose grape grass guitar hammer hand harbor hat hawk hazel heart
    hill honey hook horse hotel house ice igloo ink iron island ivory jacket jam jar jelly jewel juice
    jungle kettle key kite kitten knee knife ladder lake lamp leaf lemon letter lily lion lizard lock
    lunch magnet mango map maple market melon metal milk mirror moon moose moth mountain mouse mouth mug
    music nail napkin neck needle nest net night noise nose notebook nut oak ocean olive onion orange
    orchid otter oven owl oyster paint panda paper parrot peach pear pebble pen pencil pepper piano
    picture pie pillow pilot pine pirate planet plate plum pond potato puppet puzzle quail quartz queen
    quilt rabbit radio rain raven ribbon rice ring river road robot rocket roof root rope rose ruby sail
    salt sand school seal shell ship shirt shoe silver skirt sky snail snake snow soap sock soup spider
    spoon star stone storm street sugar sun swan table tea tent thread thumb tiger tile toast tomato towel
    tower train tree trumpet tulip turtle umbrella uncle vase violin volcano wagon wall walnut watch water
    whale wheat wheel willow window wing winter wolf wood wool yard yarn yogurt zebra zipper fig kiwi
    cherry peas cabbage carrot radish spinach celery lime coconut apricot almond walnut raisin pumpkin
    rose ant bat donkey elephant gorilla hamster kangaroo koala leopard monkey octopus penguin pig pigeon
    rat rhino shark sheep squirrel turkey unicorn walrus worm lorry truck plane bicycle tractor cloth sofa
    couch desk floor ceiling chapter paragraph sentence word page number music movie theater museum office
    bank hospital airport station summer spring day week month year minute second hour morning evening
    doctor teacher nurse farmer sailor soldier brother sister mother father cousin friend neighbor banjo
    cello harp organ tuba viola run walk jump swim dance happy sad big small tall short red green blue
    yellow purple black white brown
    """
)
WORDS = sorted(set(WORDS))

ITEMS = listed(
    """
    apples books bottles bricks buttons cakes candles cards chairs coins cookies cups eggs flowers hats
    keys lamps lemons letters marbles melons mugs nails notebooks nuts onions oranges pears pencils pens
    plates plums postcards ribbons shells socks spoons stamps stickers stones tickets tiles towels toys
    """
)

COLORS = listed(
    """
    red blue green yellow purple orange pink brown black white gray silver gold turquoise
    """
)
DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = listed(
    """
    January February March April May June July August September October November December
    """
)
CONDITIONS = listed("sunny cloudy rainy windy foggy snowy stormy clear")
LANGUAGES = listed(
    """
    French German Spanish Italian Dutch Polish Greek Turkish Hindi Japanese Korean Swedish
    """
)

_ONSETS = listed(
    """
    b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t tr v w y z
    """
)
_VOWELS = listed("a e i o u ai ea oo")
_CODAS = ["", "", "", "l", "m", "n", "r", "s", "x", "nd", "rk", "st"]


def made_up(rng: Random) -> str:
    """A pronounceable word of two or three syllables, almost surely not in any list above."""
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3)))]
    return "".join(parts) + rng.choice(_CODAS)


def name(rng: Random) -> str:
    """A first name, made up one time in three."""
    return made_up(rng).capitalize() if rng.random() < 0.33 else rng.choice(NAMES)


def full_name(rng: Random) -> str:
    surname = made_up(rng).capitalize() if rng.random() < 0.25 else rng.choice(SURNAMES)
    return f"{name(rng)} {surname}"


def city(rng: Random) -> str:
    return made_up(rng).capitalize() if rng.random() < 0.25 else rng.choice(CITIES)


def clock(rng: Random) -> str:
    """A time of day such as 09:45."""
    return f"{rng.randrange(24):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def articles(text: str) -> str:
    """Turn `a owl` into `an owl`."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def options(text: str, mark: str = "|") -> tuple[str, ...]:
    """Split a written-out list; line breaks in it mean nothing."""
    return tuple(" ".join(part.split()) for part in text.split(mark) if part.strip())


def joined(words: list[str]) -> str:
    return ", ".join(words)
