"""The service answers every ticket, soon, and whatever a grammar does it does to itself."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.grammar import service as service_module
from quire.grammar.base import Matcher
from quire.grammar.service import Compiled, GrammarService
from quire.types.structured import GrammarSpec
from tests.grammar.walk import DEMO_MODEL

HARMLESS = GrammarSpec("choice", '["yes","no"]')
PATIENCE = 120.0  # seconds, on a machine with other things to do


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    service = GrammarService(DEMO_MODEL, 4096, [2, 0])
    yield service
    service.close()


def wait(service: GrammarService, *tickets: int) -> list[Compiled]:
    """Their answers, in this order."""
    found: dict[int, Compiled] = {}
    deadline = time.monotonic() + PATIENCE
    while not found.keys() >= set(tickets):
        assert select.select([service.fileno()], [], [], max(0, deadline - time.monotonic()))[0], "no answer"
        found |= {answer.ticket: answer for answer in service.poll()}
    return [found[ticket] for ticket in tickets]


def nested_unions(depth: int) -> Any:
    if depth == 0:
        return {"type": "integer"}
    inner = nested_unions(depth - 1)
    return {"oneOf": [inner, {"type": "object", "properties": {"k": inner}, "required": ["k"]}]}


HOSTILE = [
    GrammarSpec("json_schema", json.dumps(nested_unions(11))),
    GrammarSpec(
        "json_schema", json.dumps({"allOf": [{"anyOf": [{"maxLength": i + j} for j in range(9)]} for i in range(40)]})
    ),
    GrammarSpec("json_schema", json.dumps({"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}b{9,99999}"})),
    GrammarSpec("json_schema", '{"items":' * 5000),
    GrammarSpec("regex", "(" * 5000 + "a" + ")" * 5000),
    GrammarSpec("regex", "(.*a){1,300}(.*b){1,300}" * 30),
    GrammarSpec("regex", "foo(**"),
    GrammarSpec("ebnf", "root ::= " + "(" * 3000),
    GrammarSpec("ebnf", "root ::= nothing"),
]


def test_equal_grammars_are_compiled_once(service: GrammarService) -> None:
    spec = GrammarSpec("regex", "once[0-9]")
    first, second = wait(service, service.ask(spec), service.ask(spec))
    (third,) = wait(service, service.ask(GrammarSpec("regex", "once[0-9]")))
    assert first.grammar is not None
    assert first.grammar is second.grammar is third.grammar


def test_the_descriptor_is_readable_only_while_there_are_answers(service: GrammarService) -> None:
    wait(service, service.ask(HARMLESS))
    assert service.poll() == []
    assert not select.select([service.fileno()], [], [], 0)[0]


@pytest.mark.parametrize("spec", HOSTILE, ids=lambda spec: f"{spec.kind}-{spec.text[:25]}")
def test_hostile_grammars_harm_nobody(service: GrammarService, spec: GrammarSpec) -> None:
    """They are refused, or bounded in what they cost; meanwhile others are compiled."""
    hostile = service.ask(spec)
    neighbour = service.ask(GrammarSpec("choice", json.dumps([f"beside {spec.text[:40]}"])))
    answer, other = wait(service, hostile, neighbour)
    assert other.grammar is not None
    if answer.grammar is None:
        assert answer.error is not None
        assert answer.error.param
        assert len(answer.error.message) < 1000
    else:
        follow(answer.grammar.matcher(), service)


def follow(matcher: Matcher, service: GrammarService) -> None:
    """Some tokens of an answer, until the grammar costs more than its limits allow: then its row is empty."""
    rows = np.zeros((1, 128), np.int32)
    for _ in range(30):
        service.fill([matcher], rows)
        allowed = np.flatnonzero(np.unpackbits(rows.view(np.uint8), bitorder="little"))
        if not len(allowed) or matcher.is_done:
            return
        assert matcher.accept(int(allowed[-1]))


def test_asking_never_waits(service: GrammarService) -> None:
    wait(service, service.ask(HARMLESS))
    sandbox = service._workers["llguidance"]._sandbox
    assert sandbox is not None
    os.kill(sandbox.pid, signal.SIGSTOP)
    try:  # nobody answers now, and nobody waits
        for number in range(50):
            service.ask(GrammarSpec("regex", f"never{number}(a|b)+"))
    finally:
        os.kill(sandbox.pid, signal.SIGCONT)
    tickets = [service.ask(GrammarSpec("regex", f"never{number}(a|b)+")) for number in range(50)]
    assert all(answer.grammar is not None for answer in wait(service, *tickets))


def test_limits_end_a_fork_alone(service: GrammarService) -> None:
    wait(service, service.ask(HARMLESS))
    sandbox = service._workers["llguidance"]._sandbox
    big = GrammarSpec("choice", json.dumps([f"{i} {random.Random(i).random()}" for i in range(300_000)]))
    (answer,) = wait(service, service.ask(big))
    assert answer.error is not None
    assert "too complex" in answer.error.message
    (answer,) = wait(service, service.ask(GrammarSpec("regex", "after(wards)?")))
    assert answer.grammar is not None
    assert service._workers["llguidance"]._sandbox is sandbox, "the sandbox itself has survived"


def test_a_sandbox_that_is_killed_is_noticed_and_started_again(service: GrammarService) -> None:
    """What is asked at the moment of its death is asked again."""
    wait(service, service.ask(HARMLESS))
    for number in range(6):
        assert service._workers["llguidance"]._sandbox is not None
        killed = service._workers["llguidance"]._sandbox.pid
        os.kill(killed, signal.SIGKILL)
        if number % 2:
            time.sleep(0.002 * number)
        answers = wait(service, *(service.ask(GrammarSpec("regex", f"after kill {number}{i}")) for i in range(3)))
        assert all(answer.grammar is not None for answer in answers)
        assert service._workers["llguidance"]._sandbox.pid != killed


def test_the_latest_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_KEPT", 2)
    service = GrammarService(DEMO_MODEL, 4096, [2, 0])
    try:
        specs = [GrammarSpec("regex", f"kept{number}") for number in range(3)]
        first = [wait(service, service.ask(spec))[0] for spec in specs]
        again = wait(service, service.ask(specs[2]), service.ask(specs[0]))
        assert again[0].grammar is first[2].grammar
        assert again[1].grammar is not first[0].grammar
    finally:
        service.close()


def test_many_matchers_are_filled_as_one_by_one(service: GrammarService) -> None:
    specs = [HARMLESS, GrammarSpec("json_object", ""), GrammarSpec("regex", "[a-z]+[0-9]")]
    matchers = []
    for answer in wait(service, *map(service.ask, specs)):
        assert answer.grammar is not None
        matchers += [answer.grammar.matcher(), answer.grammar.matcher()]
    ended = matchers[0]
    while not ended.is_done:
        row = np.zeros((1, 128), np.int32)
        service.fill([ended], row)
        ended.accept(int(np.unpackbits(row.view(np.uint8), bitorder="little").argmax()))
    rows = np.full((len(matchers), 128), -1, np.int32)
    service.fill(matchers, rows)
    for matcher, row in zip(matchers, rows, strict=True):
        single = np.zeros(128, np.int32)
        matcher.fill(single)
        assert (single == row).all()
    assert rows[0, 0] == 0b101, "only the stop tokens follow a complete answer"


@pytest.mark.parametrize("folder", [None, Path("/nowhere")])
def test_without_a_tokenizer_every_grammar_is_refused(folder: Path | None) -> None:
    service = GrammarService(folder, 4096, [2])
    try:
        (answer,) = wait(service, service.ask(HARMLESS))
        assert answer.error is not None
        assert "tokenizer" in answer.error.message
    finally:
        service.close()
        service.close()


def test_closing_ends_the_process() -> None:
    service = GrammarService(DEMO_MODEL, 4096, [2])
    wait(service, service.ask(HARMLESS))
    assert service._workers["llguidance"]._sandbox is not None
    pid = service._workers["llguidance"]._sandbox.pid
    service.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_backends_work_side_by_side() -> None:
    """Each for the grammars that name it; the usual one for the others. Rows of both are filled together."""
    service = GrammarService(DEMO_MODEL, 4096, [2, 0], "xgrammar")
    try:
        specs = [GrammarSpec("choice", '["yes","no"]', backend) for backend in ("llguidance", "xgrammar", "auto")]
        answers = wait(service, *map(service.ask, specs))
        grammars = [answer.grammar for answer in answers]
        assert grammars[1] is grammars[2], "the usual one is what is named"
        matchers = [grammar.matcher() for grammar in grammars if grammar is not None]
        assert [matcher.backend for matcher in matchers] == ["llguidance", "xgrammar", "xgrammar"]
        rows = np.full((3, 128), -1, np.int32)
        service.fill(matchers, rows)
        assert rows.any()
        assert (rows[0] == rows[1]).all()
        assert (rows[1] == rows[2]).all()
        (refused,) = wait(service, service.ask(GrammarSpec("regex", "(?=a)b", "xgrammar")))
        assert refused.error is not None
        assert "look-around" in refused.error.message
        big = json.dumps([f"{i} {random.Random(i).random()}" for i in range(300_000)])
        (refused,) = wait(service, service.ask(GrammarSpec("choice", big, "xgrammar")))
        assert refused.error is not None
        assert "too complex" in refused.error.message
        (after,) = wait(service, service.ask(GrammarSpec("choice", '["after"]', "xgrammar")))
        assert after.grammar is not None
    finally:
        service.close()


def test_a_backend_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    service = GrammarService(DEMO_MODEL, 4096, [2, 0])
    try:
        (answer,) = wait(service, service.ask(GrammarSpec("regex", "a", "xgrammar")))
        assert answer.error is not None
        assert "quire[xgrammar]" in answer.error.message
    finally:
        service.close()
