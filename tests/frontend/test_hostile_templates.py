"""Templates that were written to hang, to fill the memory or to get out: each ends as one clear refusal."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from quire.foundation.errors import InputError
from quire.frontend.templates.chat import render
from quire.frontend.templates.sandbox import Rendering, TemplateSandbox
from quire.server.generate import chat_prompt
from tests.effort import WHOLE, some
from tests.server.conftest import echo_server
from tests.server.echo_llm import EchoLLM
from tests.server.process import PATIENCE

T = TypeVar("T")
CHAT = [{"role": "user", "content": "hi"}]

ENDLESS = {  # more than any limit lets pass
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one long range": "{% for a in range(10**9) %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a tree of calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a recursive loop": "{% set x = [1] * 99999 %}{% for a in x recursive %}{{ loop(x) }}{% endfor %}",
    "filters in a loop": "{% set x = range(99999) | list %}{% for a in x %}{% set y = x | sum %}{% endfor %}",
    "sorting in a loop": "{% set x = range(9999)|list %}{% for a in x %}{% set y = x|sort(reverse=a) %}{% endfor %}",
    "searching in a loop": "{% set x = 'ab' * 9999999 %}{% for a in range(9999) %}{% set y = 'ba!' in x %}{% endfor %}",
    "slicing in a loop": "{% set x = 'ab' * 9999999 %}{% for a in range(9999) %}{% set y = x[::-1] %}{% endfor %}",
    "a power": "{{ 9 ** 9 ** 9 ** 9 ** 9 }}{{ 9 ** (9 ** 9) }}",
    "powers": "{% set n = namespace(i=9) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}{{ n.i }}",
    "a long text": "{{ 'a' * 10**10 }}",
    "long bytes": "{{ 'a'.encode() * 10**10 }}",
    "doubling": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "a list that doubles": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s * 2 %}{% endfor %}",
    "long texts in a list": (
        "{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = n.l + ['x' * 9999999 ~ i] %}{% endfor %}"
    ),
    "a list of one long text": "{% set s = 'x' * 9999999 %}{{ [s] * 99999 }}",
    "a list of one long text, joined": "{% set s = 'x' * 9999999 %}{{ ([s] * 99999) | join }}",
    "a list of one long text, joined as a method": "{% set s = 'x' * 9999999 %}{{ ''.join([s] * 99999) }}",
    "a list of lists": (
        "{% set n = namespace(l=[1, 2]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}"
    ),
    "a list of lists as JSON": (
        "{% set n = namespace(l=[1]) %}{% for i in range(60) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | tojson }}"
    ),
    "a width": "{{ 'a' | center(10**10) }}",
    "a constant width": "{{ 'a' | center(10000000000) }}",
    "a width of a method": "{{ 'a'.ljust(10**10) }}{{ 'a'.zfill(10**10) }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "a width of %": "{{ '%10000000000d' % 1 }}",
    "a width of % from a value": "{{ '%*d' % (10**10, 1) }}",
    "a width of format": "{{ '{:10000000000}'.format(1) }}",
    "a width of format from a value": "{{ '{:{}}'.format(1, 10**10) }}",
    "a width of the filter": "{{ '%10000000000d' | format(1) }}",
    "an indent": "{{ ('a\n' * 99999) | indent(99999) }}",
    "an indent of JSON": "{{ [[1]] | tojson(indent=10**10) }}",
    "replacing": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replacing nothing": "{{ ('a' * 99999) | replace('', 'b' * 99999) }}",
    "batches": "{{ [1] | batch(10**10, 0) | list }}",
    "slices": "{{ [1] | slice(10**10) | list }}",
    "wrapping": "{{ ('a ' * 9999999) | wordwrap(2) | urlize | striptags }}",
    "a long prompt": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "deep brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "deep loops": "{% for a in [1] %}" * 200 + "{% endfor %}" * 200,
    "a long sum": "{{ " + "+".join(["1"] * 50000) + " }}",
    "blanks before tags": (" " * 200 + "{% if 0 %}") * 3000,
    "an open comment": "{#" * 100000,
    "open tags": "{% raw %}" * 50000,
    "other files": "{% include '/etc/passwd' %}",
    "other templates": "{% import 'os' as os %}{{ os }}",
    "a base": "{% extends '/etc/passwd' %}",
    "what is not there": "{{ open('/etc/passwd').read() }}",
    "a long refusal": "{{ raise_exception('x' * 9999999) }}",
}
WALKS = [
    "''.__class__",
    "''['__class__']",
    "'' | attr('__class__')",
    "'' | attr('__cla' ~ 'ss__')",
    "messages.__class__.__mro__",
    "messages | map(attribute='__class__') | list",
    "messages | map('attr', '__class__') | list",
    "messages | groupby('__class__') | list",
    "messages | sort(attribute='__class__')",
    "raise_exception.__globals__",
    "strftime_now.__globals__",
    "namespace.__init__.__globals__",
    "cycler.__init__.__globals__",
    "joiner.__init__.__globals__",
    "lipsum.__globals__",
    "dict.mro()",
    "range.__subclasses__()",
    "self.__init__",
    "self._TemplateReference__context",
    "self | attr('_TemplateReference__context')",
    "messages.append(1)",
    "messages[0].update({})",
    "''.format.__self__.__class__",
    "'{0.__class__}'.format('')",
    "'{0.__class__.__mro__}'.format('')",
    "'{a.__class__}'.format_map({'a': ''})",
    "('{0.__class__}' | attr('format'))('')",
    "'%(a)s' % {'a': ''.__class__}",
    "nothing.__class__",
    "nothing._undefined_exception",
    "_quire_meter.step()",
    "[].__iter__().__class__",
    "(x for x in [])",
    "messages.items.__func__",
]


def in_sandbox(sources: list[str]) -> list[str | InputError]:
    """What becomes of each template, a few at a time."""

    async def run() -> list[str | InputError]:
        sandbox = TemplateSandbox()

        async def one(source: str) -> str | InputError:
            try:
                return await sandbox.render(Rendering(source, {}, CHAT, None, True, False, {}, 1_000_000))
            except InputError as error:
                return error

        found = await asyncio.gather(*map(one, sources))
        assert await one("{{ messages[0].content }}") == "hi"
        return found

    return asyncio.run(run())


def test_each_is_refused_and_harms_nobody() -> None:
    # A second of processor time each, by their nature: one of those that count, and one of those that grow.
    costly = {name for name in UNGUARDED if name not in ("sorting in a loop", "a list of lists")}
    asked = {name: source for name, source in ENDLESS.items() if WHOLE or name not in costly}
    for name, found in zip(asked, in_sandbox(list(asked.values())), strict=True):
        assert isinstance(found, InputError), (name, found[:200])
        assert found.param in ("messages", "chat_template"), name
        assert 20 < len(found.message) < 800, name


@pytest.mark.parametrize("expression", WALKS)
def test_no_attribute_leads_out(expression: str) -> None:
    for source in (f"{{{{ {expression} }}}}", f"{{% for x in [{expression}] %}}{{{{ x | pprint }}}}{{% endfor %}}"):
        try:
            text = render(CHAT, template=source)
        except InputError as error:
            text = error.message.partition(": ")[2] if " at 0x" in error.message else ""
        assert not any(word in text for word in ("class", "<", "0x", "module", "import")), text


# Only the time or the memory of a process ends these soon.
UNGUARDED = (
    "long texts in a list",
    "a list of lists",
    "a list of lists as JSON",
    "a list of one long text",
    "wrapping",
    "filters in a loop",
    "sorting in a loop",
    "searching in a loop",
    "slicing in a loop",
)


@pytest.mark.parametrize("name", [name for name in ENDLESS if name not in UNGUARDED])
def test_most_are_refused_without_the_sandbox_too(name: str) -> None:
    """As templates of operators and checkpoints are rendered."""
    with pytest.raises(InputError):
        render(CHAT, template=ENDLESS[name])


def made_up(rng: random.Random) -> str:
    """A template put together from pieces that grow, repeat and reach out."""

    def text(depth: int = 3) -> str:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice(["s", "n.s", "'ab'", "x", "messages[0].content", "7"])
        a, number = text(depth - 1), rng.choice(["2", "999", "10**6", "10**12"])
        return rng.choice(
            [
                f"({a} ~ {text(depth - 1)})",
                f"({a} ~ n.s)",
                f"(({a}) | string * {number})",
                f"({a}) | string | {rng.choice(['upper', 'trim', 'title', 'tojson', 'urlize', 'striptags'])}",
                f"({a}) | string | {rng.choice(['center', 'indent', 'truncate', 'wordwrap'])}({number})",
                f"(({a}) | string).replace('a', {text(depth - 1)} | string)",
                f"{items(depth - 1)} | {rng.choice(['join', 'string', 'tojson', 'length', 'pprint'])}",
                f"m({a})",
                *([f"({a}).__class__", f"'{{0.__class__}}'.format({a})"] if rng.random() < 0.05 else []),
            ]
        )

    def items(depth: int = 3) -> str:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice(["l", "n.l", "messages", "[1, 2]", "range(9)"])
        a = items(depth - 1)
        return rng.choice(
            [
                f"({a} | list + n.l)",
                f"({a} | list * {rng.choice(['2', '99', '10**9'])})",
                f"[{a}, {a}]",
                f"({a} | {rng.choice(['list', 'batch(2) | list', 'unique | list'])})",
                f"(({text(depth - 1)}) | string | list)",
            ]
        )

    def statement(depth: int) -> str:
        inner = "".join(statement(depth - 1) for _ in range(rng.randrange(1, 4))) if depth else ""
        return rng.choice(
            [
                f"{{% set n.s = {text()} %}}",
                f"{{% set n.l = {items()} %}}",
                f"{{% for x in {items()} %}}{inner}{{% endfor %}}",
                f"{{% for x in range({rng.choice([3, 300, 90000])}) %}}{inner}{{% endfor %}}",
                f"{{% if {text()} %}}{inner}{{% endif %}}",
                f"{{{{ {text()} }}}}",
            ]
        )

    head = "{% set n = namespace(s='ab', l=[1]) %}{% set s = 'x' * 99 %}{% set l = range(99) | list %}{% set x = 1 %}"
    return head + "{% macro m(x) %}{{ x }}{% endmacro %}" + "".join(statement(2) for _ in range(3))


def test_whatever_is_made_up_ends_as_a_prompt_or_a_refusal() -> None:
    rng = random.Random(int(os.environ.get("QUIRE_TEST_SEED", "1")))
    count = int(os.environ.get("QUIRE_TEST_TEMPLATES", str(some(24))))
    found = in_sandbox([made_up(rng) for _ in range(count)])
    texts = [one for one in found if isinstance(one, str)]
    assert 0 < len(texts) < count
    for one in found:
        if isinstance(one, str):
            assert len(one) <= 1_000_000
            assert "class '" not in one
            assert " at 0x" not in one
        else:
            assert one.param in ("messages", "chat_template")
            assert len(one.message) < 800


def test_others_are_answered_meanwhile_and_the_server_goes_on() -> None:
    hostile = {"messages": CHAT, "max_tokens": 1, "chat_template": ENDLESS["searching in a loop"]}
    with echo_server(EchoLLM(served_model_name=["echo"]), trust_request_chat_template=True) as served:
        path, order = "/v1/chat/completions", []

        def attack() -> None:
            reply = served.client.post(path, json=hostile)
            order.append(("hostile", reply.status_code, reply.json()["error"]["param"]))

        served.client.post(path, json={**hostile, "chat_template": "x"})  # the sandbox is there
        threads = [threading.Thread(target=attack) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            reply = served.client.post(path, json={"messages": CHAT, "max_tokens": 20})
            order.append(("friendly", reply.status_code, None))
        for thread in threads:
            thread.join()
        assert order == [("friendly", 200, None)] * 3 + [("hostile", 400, "chat_template")] * 2
        for route, body in (
            ("/tokenize", {"messages": CHAT, "chat_template": ENDLESS["a power"]}),
            (path, {**hostile, "chat_template": ENDLESS["recursion"]}),
        ):
            assert served.client.post(route, json=body).status_code == 400


def test_only_so_many_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_prompt, "MAX_WAITING", 0)
    body = {"messages": CHAT, "max_tokens": 1}
    with echo_server(EchoLLM(served_model_name=["echo"]), trust_request_chat_template=True) as served:
        refused = served.client.post("/v1/chat/completions", json=body | {"chat_template": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert served.client.post("/v1/chat/completions", json=body).status_code == 200


def test_a_sandbox_that_is_killed_comes_back() -> None:
    async def run() -> None:
        sandbox = TemplateSandbox()
        friendly = Rendering("{{ messages[0].content }}", {}, CHAT, None, True, False, {}, 100)
        assert await sandbox.render(friendly) == "hi"
        assert sandbox.pid is not None
        os.kill(sandbox.pid, 9)
        assert await gathered(*(sandbox.render(friendly) for _ in range(5))) == ["hi"] * 5

    async def gathered(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
        return list(await asyncio.gather(*coroutines))

    asyncio.run(run())


def test_nobody_waits_for_templates_whose_clients_are_gone() -> None:
    async def run() -> None:
        sandbox = TemplateSandbox()
        kwargs: list[Any] = [{}, CHAT, None, True, False, {}, 100]
        assert await sandbox.render(Rendering("x", *kwargs)) == "x"
        slow = Rendering(ENDLESS["searching in a loop"], *kwargs)
        tasks = [asyncio.create_task(sandbox.render(slow)) for _ in range(1000)]  # 500 s of two processes
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await asyncio.wait_for(sandbox.render(Rendering("y", *kwargs)), PATIENCE) == "y"

    asyncio.run(run())
