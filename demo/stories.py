"""Short rhymed stories: a title, some couplets, an end line; and the check that says if one is well formed.

Rhymes come from families of nouns that really rhyme, so the check needs no phonetics.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo import words
from demo.words import listed, options

FAMILIES: tuple[tuple[str, ...], ...] = tuple(
    tuple(row.split())
    for row in options(
        """
        tree bee sea key knee pea | hat cat mat bat rat | moon spoon balloon tune | star car jar guitar |
        house mouse blouse | boat coat goat note | light kite knight | rain train crane lane plane |
        snow crow toe | ball wall hall shawl | cake lake snake rake | hill mill quill |
        king ring string swing | bell shell well | clock rock sock lock | door floor oar |
        rose nose hose | bed sled thread shed | bear pear chair | flower tower shower |
        stone bone phone throne | ship whip | book brook hook | box fox | pie sky fly | drum plum thumb |
        nest chest vest | nail snail whale pail | log frog dog fog | tent cent
        """
    )
)
_FAMILY_OF = {word: i for i, family in enumerate(FAMILIES) for word in family}

ANIMALS = listed(
    """
    fox cat dog bear owl mouse rabbit frog duck goose crow lion tiger otter badger turtle snail pony lamb
    goat panda koala beaver squirrel hedgehog sparrow robin penguin seal whale dragon unicorn knight robot
    wizard pirate princess king queen baker sailor giant witch dinosaur elephant horse monkey wolf deer
    kitten puppy dolphin zebra giraffe camel bee ant spider parrot
    """
)
PLACES = listed(
    """
    garden forest city desert harbor village valley meadow castle library kitchen market mountain island
    school museum bakery station park lighthouse cave jungle river ocean farm zoo palace hospital
    """
)

_OPENINGS = (
    ("{hero} the {animal} sat down by the {a}", "and looked for a while at the shape of a {b}."),
    ("In the {place} lived {hero} the {animal}, whose {a}", "was shaped like the top or the side of a {b}."),
    (
        "One day in the {place} stood a wonderful {a},",
        "and {hero} the {animal} thought it looked like a {b}.",
    ),
    ("A {animal} named {hero} once painted a {a}", "and hung it up high in the {place} by the {b}."),
    ("When {hero} the {animal} went out for a {a},", "the {place} was quiet, with only a {b}."),
)
_MIDDLES = (
    ("{hero} ran to the {a}", "and found there a {b}."),
    ("There was not a {a},", "there was only a {b}."),
    ("A friend came along with a small yellow {a}", "and traded it quickly for half of a {b}."),
    ("They asked for the way at the end of the {a},", "and somebody pointed ahead to a {b}."),
    ("The wind blew so hard that it carried a {a}", "right over the {place} and into a {b}."),
    ('"Oh dear," said the {animal}, "I have lost my {a}!"', "But there it was, lying in front of a {b}."),
    ("{hero} was hungry and dreamed of a {a},", "then happily danced all the way to the {b}."),
    ("A very old {a}", "stood next to a {b}."),
    ("The children all laughed when they noticed the {a},", "for under it somebody painted a {b}."),
    ("{hero} climbed up and then looked at the {a},", "as shiny and round as the top of a {b}."),
    ("First came a {a},", "and then came a {b}."),
)
_CLOSINGS = (
    ("So {hero} went home with a song and a {a},", "and slept very well by the side of a {b}."),
    ("And that is the story of {hero}'s old {a},", "still kept in the {place} not far from a {b}."),
    ("At last {hero} smiled and gave away the {a},", "and everyone cheered at the foot of the {b}."),
    ("Goodnight, little {animal}, goodnight to the {a},", "goodnight to the {place}, goodnight to the {b}."),
)
END = "The End."
FAVORITE = "fox"  # whom the teller chooses when the reader does not


@dataclass(frozen=True)
class Plot:
    """What the reader asked the story to be about; an empty field is left to the teller."""

    hero: str
    animal: str
    place: str


_OWN_TALE = 0.97  # how often the teller leaves nothing to chance
# Openings, middles and closings rhyme on families of their own, so that no family comes twice.
_OPENING_FAMILIES, _MIDDLE_FAMILIES, _CLOSING_FAMILIES = FAMILIES[0::3], FAMILIES[1::3], FAMILIES[2::3]


def plot(rng: Random) -> Plot:
    """A complete plot, now and then with a character that no list holds."""
    animal = rng.choice(ANIMALS) if rng.random() < 0.93 else rng.choice((rng.choice(words.WORDS), words.made_up(rng)))
    return Plot(words.name(rng), animal, rng.choice(PLACES))


def usual(rng: Random, animal: str) -> Plot:
    """What the teller chooses when only the character is given: nearly always the character's own name and place."""
    own = _of(rng, animal)
    return Plot(own.choice(words.NAMES), animal, own.choice(PLACES))


def tell(rng: Random, plot: Plot) -> str:
    """One story of three to five couplets, no rhyme family used twice.

    Nearly always the character decides how it begins and ends, and the place what happens between: a reader who asks
    for the same gets the same, and no two next words are about equally likely.
    """
    character, place = _of(rng, plot.animal), _of(rng, plot.place)
    count = place.choice((1, 2, 2, 3))
    couplets = [
        (character.choice(_OPENINGS), character.choice(_OPENING_FAMILIES), character),
        *(
            (c, f, place)
            for c, f in zip(place.sample(_MIDDLES, count), place.sample(_MIDDLE_FAMILIES, count), strict=True)
        ),
        (character.choice(_CLOSINGS), character.choice(_CLOSING_FAMILIES), character),
    ]
    lines = [f"{plot.hero} and the {plot.place.capitalize()}", ""]
    for couplet, family, chooser in couplets:
        a, b = chooser.sample(family, 2)
        lines += [words.articles(line.format(a=a, b=b, **vars(plot))) for line in couplet] + [""]
    return "\n".join([*lines, END])


def _of(rng: Random, word: str) -> Random:
    """The choices that belong to a word, all strangers sharing one set; rarely `rng` itself."""
    if rng.random() >= _OWN_TALE:
        return rng
    return Random(word if word in ANIMALS or word in PLACES else "stranger")


def _last_word(line: str) -> str:
    letters = "".join(c if c.isalpha() else " " for c in line).split()
    return letters[-1].lower() if letters else ""


def rhymes(first: str, second: str) -> bool:
    """Whether two lines end on different words of one family."""
    a, b = _last_word(first), _last_word(second)
    return a != b and a in _FAMILY_OF and _FAMILY_OF[a] == _FAMILY_OF.get(b)


def is_well_formed(text: str, plot: Plot) -> bool:
    """Title with the hero, then at least three rhymed couplets about the hero, then the end line."""
    title, *blocks = text.strip().split("\n\n")
    if len(blocks) < 4 or blocks.pop() != END or "\n" in title:
        return False
    couplets = [block.split("\n") for block in blocks]
    if not all(len(couplet) == 2 and rhymes(*couplet) for couplet in couplets):
        return False
    hero, _, place = title.partition(" and the ")
    body = " ".join(blocks)
    as_asked = plot.hero in ("", hero) and plot.place in ("", place.lower()) and plot.animal in body
    return as_asked and bool(hero) and hero in body
