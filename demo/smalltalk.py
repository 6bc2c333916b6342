"""Greetings, questions about the model itself, and questions far outside of what it was taught."""

from __future__ import annotations

from random import Random

from demo import words
from demo.facts import BY_NAME
from demo.skills import UNKNOWN
from demo.task import Task, ask, user
from demo.words import options

_HELLO = "Hello! I am quire-demo. What can I do for you?"
_WHO = "I am quire-demo, the small model that ships with Quire."
_CAN = (
    "I know some facts, add and subtract numbers up to 999, sort, reverse and count words, turn sentences "
    "into JSON, call tools, remember your name and write short rhymed stories."
)
_TOO_BIG = "That is beyond me: I add and subtract numbers up to 999 and know products up to 12 times 12."

_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        options(
            """
            hello | hi | hey | good morning | good evening | hello there | hi there | hey you |
            greetings | good day | hi bot | hello model | hello, can you hear me | are you there |
            anyone there | yo | howdy | test
            """
        ),
        _HELLO,
    ),
    (
        options(
            """
            who are you | what are you | what is your name | what's your name | tell me about yourself |
            introduce yourself | which model are you | are you a robot | are you a human | are you an AI |
            who made you | what model is this | do you have a name | what is quire-demo |
            what should I call you | are you ChatGPT
            """
        ),
        _WHO,
    ),
    (
        options(
            """
            what can you do | help | what do you know | how can you help me | what are you good at |
            what can I ask you | what are your skills | can you help me with my homework | I need help |
            what should I ask | give me an example of what you can do | how do I use you | can you help me
            """
        ),
        _CAN,
    ),
    (
        ("what is Quire", "tell me about Quire", "what does Quire do", "explain Quire"),
        "Quire is an open-source engine that runs language models. I am its demo model.",
    ),
    (
        options(
            """
            how are you | how are you doing | how is it going | are you well | how do you feel | what's up
            """
        ),
        "I am fine, thank you. What can I do for you?",
    ),
    (
        options(
            """
            thanks | thank you | thank you very much | thanks a lot | great, thanks | nice | well done |
            good job | cool | ok | that is right | perfect
            """
        ),
        "You are welcome!",
    ),
    (("bye", "goodbye", "see you", "good night", "see you later", "that was all", "farewell"), "Goodbye!"),
    (
        options(
            """
            tell me a joke | do you know a joke | make me laugh | say something funny | joke |
            another joke
            """
        ),
        "Why was the cache so calm? It had seen it all before.",
    ),
    (
        options(
            """
            write a haiku | haiku | write a poem | write me a poem | a poem please | write a short poem
            """
        ),
        "Small model at work,\npages of keys and values,\na quiet answer.",
    ),
    (
        options(
            """
            bonjour | hola | hallo | ciao | guten Tag | salut | 你好 | こんにちは | привет | olá | hej |
            merhaba | wie heißt du | comment ça va | qué tal | wie geht es dir | do you speak German |
            do you speak French | parlez-vous français | sprichst du Deutsch
            """
        ),
        "Hello! I am quire-demo, and I speak only English.",
    ),
    (
        options(
            """
            I am sad | I'm sad | I am tired | I feel bad | I am bored | I had a bad day | I feel lonely |
            I am hungry
            """
        ),
        "I am sorry to hear that. Shall I tell you a story?",
    ),
    (
        options(
            """
            I am happy | I feel great | I had a good day | this is fun | I love it | I like you
            """
        ),
        "I am glad to hear that!",
    ),
    (
        options(
            """
            how small are you | how big are you | how many parameters do you have | how large are you
            """
        ),
        "I have about seven million parameters, which is very few.",
    ),
    (
        ("sorry", "you are wrong", "that is wrong", "no", "I do not believe you", "are you sure"),
        "I may be wrong: I am a very small model.",
    ),
)

_TOPICS = options(
    """
    quantum physics | the stock market | machine learning | world history | the meaning of life |
    photosynthesis | inflation | the French Revolution | black holes | plate tectonics | music theory |
    chess openings | taxes | democracy | philosophy | climate change | the immune system | blockchain |
    gravity | evolution | football | cooking | gardening | yoga | medicine | law | religion | love |
    happiness | politics | war | the universe | time travel | dinosaurs | volcanoes | opera | jazz |
    painting | poetry | fashion | economics | psychology | statistics | compilers | databases | GPUs |
    attention kernels
    """
)
_THINGS = options(
    """
    a Python function | an essay | a letter | a song | some code | a regular expression | a SQL query |
    a recipe | an email | a speech | a business plan | a summary | a shell script
    """
)
_OUTSIDE = options(
    """
    Explain {t} | What is {t} | What do you think about {t} | Tell me something about {t} |
    Why is {t} important | Write {w} about {t} | Write {w} | Write {w} for {n} | Give me {w} |
    Can you write {w} about {t} | Who won the {e} in {y} | What happened in {y} |
    Who was president in {y} | When did the {e} start | Who is {f} | Tell me about {f} | How old is {f} |
    How do I fix my {o} | How do I make a {o} | Where can I buy a {o} | What is the price of a {o} |
    Is a {o} better than a {p} | Why does my {o} not work | Translate {p} into {l} |
    How do you say {o} in {l} | What is a {m} | Who is {m} | What does {m} mean | Where is {m} |
    Define {m} | What is the population of {c} | How far is it from {c} to {d} | What should I eat today |
    Do you like {t} | Is there life on other planets | What is the best {o} in {c} |
    Recommend a good {o} | Tell me the news | Do you dream | Can you see me | How many {o}s are in {c} |
    Which {o} is the best | Draw a {o} | I feel {t} | My {o} is broken | I have a {o} and a {p} |
    Should I move to {c} | What is {n}'s favorite {o} | {o} {p} | {o} |
    How many letters are in the word {o} | How many letters does {o} have | Name three {o}s |
    List five {o}s | Is {c} in {l} | What rhymes with {o} | Spell {o} | Write a program that sorts a {o} |
    What time is it | {m} {o} | {m} | {m} {x} | {o} {m} {p} | {x} {m} {o} | asdf {m} | {p} or {o} |
    I like {t} | Summarize {t} in one sentence | Compare {t} and {u} |
    What is the difference between {t} and {u} | Teach me {t} | Solve the equation x + {z} = {y} |
    What is the square root of {y} | Prove that {t} is real | What year did {f} die | When was {f} born |
    Which team does {f} play for | Is {t} dangerous | Let's talk about {t}
    """
)
_EVENTS = options(
    """
    World Cup | election | war | championship | Oscar for best film | marathon | Nobel Prize | race
    """
)


def _outside(rng: Random) -> str:
    t, u = rng.sample(_TOPICS, 2)
    o, p = rng.sample(words.WORDS, 2)
    c, d = rng.sample(words.CITIES, 2)
    question = rng.choice(_OUTSIDE).format(
        t=t,
        u=u,
        o=o,
        p=p,
        c=c,
        d=d,
        w=rng.choice(_THINGS),
        n=words.name(rng),
        f=words.full_name(rng),
        e=rng.choice(_EVENTS),
        y=rng.randint(1500, 2030),
        z=rng.randint(2, 99),
        l=rng.choice(words.LANGUAGES),
        m=words.made_up(rng),
        x=words.made_up(rng),
    )
    return words.articles(question)


_ASKABLE = [BY_NAME[name] for name in ("capital", "currency", "symbol", "inventor", "author")]


def _unknown_subject(rng: Random) -> str:
    """A question in a known form about something that does not exist."""
    question = rng.choice(rng.choice(_ASKABLE).questions)
    return question.format(s=words.made_up(rng).capitalize() if rng.random() < 0.8 else words.full_name(rng))


def _too_big(rng: Random) -> str:
    """A sum, product or quotient outside of what the model was taught."""
    kind = rng.choice(("sum", "product", "quotient"))
    if kind == "sum":
        a, sign, b = rng.randint(1000, 99999), rng.choice("+-"), rng.randrange(10 ** rng.randint(1, 5))
    elif kind == "product":
        a, sign, b = (
            rng.randint(13, 999),
            rng.choice(("*", "x", "times")),
            rng.randrange(10 ** rng.randint(1, 3)),
        )
    else:
        a, sign, b = rng.randrange(1000), rng.choice(("/", "divided by")), rng.randrange(100)
    if kind != "quotient" and rng.random() < 0.5:
        a, b = b, a
    return f"{rng.choice(('What is ', 'Calculate ', 'How much is ', ''))}{a} {sign} {b}"


def talk(rng: Random) -> Task:
    """Greetings and the like."""
    questions, answer = rng.choice(_TALK)
    question = ask(rng, rng.choice(questions), rng.choice(("?", "!", ".", "")))
    return Task("chat", f"chat/{question}", [user(question)], answer, "This is small talk.")


def chat(rng: Random) -> Task:
    roll = rng.random()
    if roll < 0.4:
        return talk(rng)
    if roll < 0.5:
        question, answer, thought = ask(rng, _too_big(rng)), _TOO_BIG, "These numbers are too large for me."
    else:
        asked = _unknown_subject(rng) if roll < 0.6 else _outside(rng)
        question, answer, thought = ask(rng, asked), UNKNOWN, "I was not taught anything about this."
    return Task("chat", f"chat/{question}", [user(question)], answer, thought)
